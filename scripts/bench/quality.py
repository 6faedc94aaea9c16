#!/usr/bin/env python3
"""Measure the loss of quality in each precision, beside llama.cpp's quantisations of the same weights.

    .venv/bin/python scripts/bench/quality.py [--peers DIR] [--threads 2] [--quick] [--json]

The data are twenty English texts of 512 tokens: Python's help topics, which every installation has. As in
llama-perplexity, the first half of a text is context and the second half is scored. All results are compared with a
float32 run of the default model: the perplexity, the share of positions with the same most likely token, the mean KL
divergence, and the largest error of a row's logits relative to its largest logit.

--peers DIR names a folder that has llama.cpp's `llama-perplexity` and `*-Q8_0.gguf`, `*-Q4_0.gguf`, `*-Q4_1.gguf` (also
F32 and BF16), at any depth. llama-perplexity reads our tokens and our float32 log-probabilities
(`--kl-divergence-base`), so both sides are scored on the same texts against the same reference.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from harness import arguments, processor, row_view

from decoder.batch import Chunk, StepBatch
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from libsym.abi import PAGE_ENTRIES

Floats: TypeAlias = npt.NDArray[np.float32]
Tokens: TypeAlias = npt.NDArray[np.int32]
Source: TypeAlias = Callable[[Tokens], Floats]
"""Function from a text's tokens to the logits of its scored rows: [SCORED, vocab]."""

NUM_TEXTS = 20
CONTEXT = 512
FIRST = CONTEXT // 2
"""Index of the first token whose next token is scored. The index of the last is CONTEXT - 2, as in llama-perplexity."""
SCORED = CONTEXT - 1 - FIRST
PRECISIONS = ("float32", "bf16", "int8", "int4")
PEER_KINDS = ("F32", "BF16", "Q8_0", "Q4_1", "Q4_0")
LEAST_LOG_PROB = -16.0
"""Least log-probability of tokens in the KL divergence. llama.cpp's file of log-probabilities has no lower ones."""


@dataclass(slots=True)
class Score:
    """Sums of the errors over all rows so far."""

    rows: int = 0
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    worst: float = 0.0

    def add(self, reference: Floats, got: Floats, following: Tokens) -> None:
        """Add rows of logits [rows, vocab]. `following` has the token after each row, and may lack the last one."""
        expected, found = log_softmax(reference), log_softmax(got)
        self.rows += len(got)
        nll = -found[np.arange(len(following)), following].mean(dtype=np.float64)
        self.nll += float(nll) * len(got)
        divergence = np.exp(expected) * (expected - found)
        self.kl += float(divergence.sum(where=expected > LEAST_LOG_PROB, dtype=np.float64))
        self.same += int((reference.argmax(axis=1) == got.argmax(axis=1)).sum())
        error = np.abs(got - reference).max(axis=1) / np.abs(reference).max(axis=1)
        # np.max returns NaN if one value is NaN. The built-in max() could ignore the NaN.
        self.worst = float(np.max([self.worst, error.max()]))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the quality of one side."""

    name: str
    perplexity: float
    same: float
    kl: float
    worst: float | None = None
    """None if the side does not report this error. llama-perplexity does not."""


@dataclass(slots=True)
class Ours:
    """The CPU decoder in one precision."""

    model: Model
    precision: str
    threads: int
    isa: str | None
    decoder: CpuDecoder = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        arena = Arena(config, CONTEXT // PAGE_ENTRIES, "F32" if self.precision == "float32" else "BF16")
        weights = self.model.weights
        self.decoder = CpuDecoder(config, weights, arena, self.threads, self.isa, precision=self.precision)

    def logits(self, tokens: Tokens) -> Floats:
        out = np.empty((SCORED, self.model.config.vocab_size), np.float32)
        pages = np.arange(CONTEXT // PAGE_ENTRIES, dtype=np.int32)
        views = tuple(map(row_view, out))
        for start, end, rows in ((0, FIRST, views[:0]), (FIRST, FIRST + SCORED, views)):
            positions = np.arange(start, end, dtype=np.int32)
            self.decoder.step(StepBatch((Chunk(tokens[start:end], positions, pages, start, rows),)))
        return out


def read_texts(model: Model, count: int, length: int) -> Tokens:
    """Return the beginnings of the first topics (by name) that are long enough: [count, length]."""
    texts = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    return np.array([text[:length] for text in texts if len(text) >= length][:count], np.int32)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def measure(name: str, source: Source, texts: Tokens, references: Floats) -> Row:
    score = Score()
    for text, reference in zip(texts, references, strict=True):
        score.add(reference, source(text), text[FIRST + 1 :])
        print(f"\r{name:24} {score.rows // SCORED:3}/{len(texts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = score.rows
    return Row(name, float(np.exp(score.nll / rows)), score.same / rows, score.kl / rows, score.worst)


def write_base(path: Path, texts: Tokens, references: Floats) -> None:
    """Write tokens and log-probabilities to a file for llama-perplexity.

    A row has the step between codes and the least log-probability (float32), then a uint16 code for each token. Logits
    that are 16 or more below the greatest one have code 0.
    """
    vocab = references.shape[2]
    with path.open("wb") as file:
        file.write(
            b"_logits_" + np.array([CONTEXT, vocab, len(texts)], "<i4").tobytes() + texts.astype("<i4").tobytes()
        )
        for logits in references:
            most = logits.max(axis=1, keepdims=True)
            least = np.maximum(logits.min(axis=1, keepdims=True), most - 16)
            log_sum = np.log(np.exp(logits - most).sum(axis=1, keepdims=True))
            step = (most - least) / np.float32(65_535)
            codes = np.rint((np.maximum(logits, least) - least) / step).astype("<u2")
            if vocab % 2:
                codes = np.pad(codes, ((0, 0), (0, 1)))
            head = np.concatenate((step, least - most - log_sum), axis=1).astype("<f4")
            file.write(np.concatenate((head.view("<u2"), codes), axis=1).tobytes())


def measure_peer(program: Path, gguf: Path, base: Path, threads: int) -> Row:
    """Measure a file's quality with llama-perplexity."""
    command: list[str | Path] = [program, "-m", gguf, "--kl-divergence", "--kl-divergence-base", base]
    command += ["-c", str(CONTEXT), "-b", str(CONTEXT)]
    done = subprocess.run([*command, "-t", str(threads)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"{program} failed on {gguf}: {said[-2000:]}")

    def figure(label: str) -> float:
        found = re.search(rf"^{label}\s*:\s*(\S+)", said, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{program} did not say {label!r} of {gguf}: {said[-2000:]}")
        return float(found[1])

    kind = gguf.stem.rsplit("-", 1)[1]
    same = figure("Same top p") / 100
    return Row(f"llama.cpp {kind}", figure(r"Mean PPL\(Q\)"), same, figure(r"Mean\s+KLD"))


def measure_peers(folder: Path, texts: Tokens, references: Floats, threads: int) -> list[Row]:
    program = next(iter(sorted(folder.rglob("llama-perplexity"))), None)
    if program is None:
        raise SystemExit(
            f"no llama-perplexity below {folder}: build llama.cpp there, see scripts/bench/peers/README.md"
        )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "float32.kld"
        write_base(base, texts, references)
        for kind in PEER_KINDS:
            gguf = next(iter(sorted(folder.rglob(f"*-{kind}.gguf"))), None)
            if gguf is None:
                print(f"no *-{kind}.gguf below {folder}: left out", file=sys.stderr)
                continue
            rows.append(measure_peer(program.resolve(), gguf.resolve(), base, threads))
            print(f"{rows[-1].name:24} done", file=sys.stderr)
    return rows


def table(rows: list[Row], reference: float) -> str:
    lines = [
        "| | perplexity | against float32 | same greedy token | mean KL | largest logit error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        worst = "-" if row.worst is None else f"{row.worst:.2g}"
        change = f"{100 * (row.perplexity / reference - 1):+.3f} %"
        cells = (row.name, f"{row.perplexity:.4f}", change, f"{100 * row.same:.2f} %", f"{row.kl:.6f}", worst)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(
        __doc__,
        precisions=",".join(PRECISIONS),
        peers=(Path, "a folder with llama-perplexity and its models"),
        threads=available_cores(),
        isa=(str, "an instruction set of the CPU decoder; default: the best here"),
        quick=(False, "one text and one precision"),
        json=False,
    )
    options = parser.parse_args()
    model = load_model(None)
    texts = read_texts(model, 1 if options.quick else NUM_TEXTS, CONTEXT)
    source = Ours(model, "float32", options.threads, options.isa).logits
    references = np.empty((len(texts), SCORED, model.config.vocab_size), np.float32)
    base = Score()
    for text, rows in zip(texts, references, strict=True):
        rows[:] = source(text)
        base.add(rows, rows, text[FIRST + 1 :])
    perplexity = float(np.exp(base.nll / base.rows))
    del source

    results, isa = [], ""
    for precision in ["int8"] if options.quick else options.precisions.split(","):
        ours = Ours(model, precision, options.threads, options.isa)
        isa = ours.decoder.isa
        results.append(measure(f"Symphony {precision}", ours.logits, texts, references))
        ours.decoder.close()
    if options.peers:
        results += measure_peers(options.peers, texts, references, options.threads)
    about = f"{model.name}, {len(texts)} texts, {base.rows} rows; float32: perplexity {perplexity:.4f}; {isa}"
    print(f"{processor()}; {about}\n")
    print(table(results, perplexity))
    if options.json:
        report = {"about": about, "reference_perplexity": perplexity, "results": [asdict(row) for row in results]}
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
