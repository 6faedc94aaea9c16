#!/usr/bin/env python3
"""Measures what each precision costs in quality, beside llama.cpp's own quantisations of the same weights.

    .venv/bin/python scripts/bench/quality.py [--peers DIR] [--reference transformers] [--threads 2] [--json FILE]

Twenty English texts (the longest-lived ones at hand: Python's own help topics) of 512 tokens each; as in
llama-perplexity, the first half of a text is context and the second half is scored. Everything is compared with one
float32 run over the default model's weights: perplexity, the share of positions where the most likely token is the
same, the mean KL divergence, and the largest error of a row's logits relative to its largest logit.

--peers DIR: a folder with llama.cpp's `llama-perplexity` and `*-Q8_0.gguf`, `*-Q4_0.gguf`, `*-Q4_1.gguf` (also F32
and BF16) somewhere below. It reads our float32 log-probabilities and our tokens (`--kl-divergence-base`), so that
both sides are scored on the same windows against the same reference.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoder.batch import Chunk, StepBatch
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from libsym.abi import PAGE_ENTRIES

Floats: TypeAlias = npt.NDArray[np.float32]
Tokens: TypeAlias = npt.NDArray[np.int32]
Source: TypeAlias = Callable[[Tokens], Floats]
"""The logits of the scored rows of a text: [SCORED, vocab]."""

NUM_TEXTS = 20
CONTEXT = 512
FIRST = CONTEXT // 2
"""llama-perplexity scores what follows tokens FIRST .. CONTEXT - 2."""
SCORED = CONTEXT - 1 - FIRST
PRECISIONS = ("float32", "bf16", "int8", "int4")
PEER_KINDS = ("F32", "BF16", "Q8_0", "Q4_1", "Q4_0")
LEAST_LOG_PROB = -16.0
"""Less likely tokens are left out of the KL divergence: llama.cpp's file of log-probabilities does not hold them."""


@dataclass(slots=True)
class Score:
    """Sums over the rows so far."""

    rows: int = 0
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    worst: float = 0.0

    def add(self, reference: Floats, got: Floats, following: Tokens) -> None:
        """Both [rows, vocab]; `following` is the text's token after each row."""
        expected, found = log_softmax(reference), log_softmax(got)
        rows = np.arange(len(following))
        self.rows += len(rows)
        self.nll -= float(found[rows, following].sum(dtype=np.float64))
        divergence = np.exp(expected) * (expected - found)
        self.kl += float(divergence.sum(where=expected > LEAST_LOG_PROB, dtype=np.float64))
        self.same += int((reference.argmax(axis=1) == got.argmax(axis=1)).sum())
        error = np.abs(got - reference).max(axis=1) / np.abs(reference).max(axis=1)
        # Written so that a NaN is the worst of all: max() would pass it over.
        self.worst = float(np.max([self.worst, error.max()]))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    perplexity: float
    same: float
    kl: float
    worst: float | None = None
    """None: llama-perplexity does not tell."""


@dataclass(slots=True)
class Ours:
    """One precision of the CPU decoder."""

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
        views = tuple(memoryview(row) for row in out)
        for start, end, rows in ((0, FIRST, ()), (FIRST, FIRST + SCORED, views)):
            positions = np.arange(start, end, dtype=np.int32)
            self.decoder.step(StepBatch((Chunk(tokens[start:end], positions, pages, start, rows),)))
        return out


def transformers_logits(model: Model, threads: int) -> Source:
    """The same weights as transformers runs them, in float32."""
    torch.set_num_threads(threads)
    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    state = {name: torch.from_numpy(model.weights.read(name)) for name in model.weights.names()}
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()

    @torch.inference_mode()
    def logits(tokens: Tokens) -> Floats:
        ids = torch.from_numpy(tokens[: FIRST + SCORED].astype(np.int64))[None]
        rows: Floats = theirs(ids, logits_to_keep=SCORED).logits[0].numpy()
        return rows

    return logits


def read_texts(model: Model) -> Tokens:
    """[NUM_TEXTS, CONTEXT]: the beginnings of the first topics, by name, that are long enough."""
    texts = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    return np.array([text[:CONTEXT] for text in texts if len(text) >= CONTEXT][:NUM_TEXTS], np.int32)


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
    """llama-perplexity's file of log-probabilities, which also holds the tokens.

    A row is the step between codes and the least log-probability (float32), then a uint16 code for each token:
    0 for what is 16 or more below the greatest logit.
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
    """What llama-perplexity says of one file."""
    size = str(CONTEXT)
    command = [program, "-m", gguf, "--kl-divergence", "--kl-divergence-base", base, "-c", size, "-b", size]
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--reference", default="ours", choices=["ours", "transformers"], help="whose float32")
    parser.add_argument("--peers", type=Path, help="a folder with llama-perplexity and its models")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", help="an instruction set of the CPU decoder; default: the best here")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()

    model = load_model(None)
    texts = read_texts(model)
    source = (
        transformers_logits(model, options.threads)
        if options.reference == "transformers"
        else Ours(model, "float32", options.threads, options.isa).logits
    )
    references = np.empty((len(texts), SCORED, model.config.vocab_size), np.float32)
    base = Score()
    for text, rows in zip(texts, references, strict=True):
        rows[:] = source(text)
        base.add(rows, rows, text[FIRST + 1 :])
    perplexity = float(np.exp(base.nll / base.rows))
    del source

    results, isa = [], ""
    for precision in options.precisions:
        ours = Ours(model, precision, options.threads, options.isa)
        isa = ours.decoder.isa
        results.append(measure(f"Symphony {precision}", ours.logits, texts, references))
        ours.decoder.close()
    if options.peers:
        results += measure_peers(options.peers, texts, references, options.threads)
    whose = "transformers" if options.reference == "transformers" else "Symphony"
    print(f"{model.name}, {len(texts)} texts, {base.rows} rows; {whose} float32: perplexity {perplexity:.4f}; {isa}\n")
    print(table(results, perplexity))
    if options.json:
        report = {
            "model": model.name,
            "isa": isa,
            "rows": base.rows,
            "reference": f"{whose} float32",
            "reference_perplexity": perplexity,
            "results": [
                {"name": r.name, "perplexity": r.perplexity, "same": r.same, "kl": r.kl, "max_relative_error": r.worst}
                for r in results
            ],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
