#!/usr/bin/env python3
"""Measures what moving and joining KV costs in accuracy against computing it again, and in time.

    .venv/bin/python scripts/bench/rebase.py [--precisions float32 bf16] [--texts 12] [--threads 2] [--json FILE]

Texts are Python's own help topics, 640 tokens each: 512 tokens of context, whose KV is moved or joined, then 128 tokens
that are scored, each row's distribution against the one after a context that was computed as it stands:

    moved by N       the context was computed at positions from N on and rebased to 0 (kv_extract)
    N joined         the context was computed in N pieces, none of which saw another, and merged (kv_merge)
    N joined, as is  the same with rebase=False: the pieces' positions overlap
    middle left out  the third quarter was left out (kv_extract), against computing the rest without it
    no context       what there is to lose

Figures: the mean KL divergence, the share of rows with the same most likely token, the perplexity of the text, and
the largest error of a row's logits relative to its largest logit. It is the file system's own code that moves them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoder.batch import Chunk, StepBatch
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from kvfs.pages.assemble import Piece
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES
from tests.kvfs.fakes import assemble

Floats: TypeAlias = npt.NDArray[np.float32]
Tokens: TypeAlias = npt.NDArray[np.int32]

CONTEXT, SCORED = 512, 128
NUM_PAGES = 256
SHIFTS = (1000, 7000)
PIECES = (2, 4, 16)


@dataclass(slots=True)
class Score:
    """Sums over the rows of one case."""

    name: str
    rows: int = 0
    kl: float = 0.0
    same: int = 0
    nll: float = 0.0
    worst: float = 0.0

    def add(self, reference: Floats, got: Floats, following: Tokens) -> None:
        expected, found = log_softmax(reference), log_softmax(got)
        self.rows += len(got)
        self.kl += float((np.exp(expected) * (expected - found)).sum())
        self.same += int((reference.argmax(axis=1) == got.argmax(axis=1)).sum())
        scored = min(len(following), len(found))
        self.nll -= float(found[np.arange(scored), following[:scored]].sum()) * len(found) / scored
        error = np.abs(got - reference).max(axis=1) / np.abs(reference).max(axis=1)
        self.worst = float(np.max([self.worst, error.max()]))  # a NaN is the worst of all

    def row(self, precision: str) -> dict[str, str | float]:
        return {
            "precision": precision,
            "case": self.name,
            "kl": self.kl / self.rows,
            "same": self.same / self.rows,
            "perplexity": float(np.exp(self.nll / self.rows)),
            "worst": self.worst,
        }


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
    return result


class Bench:
    """Files of a pool in one precision, over the arena that the decoder computes in."""

    def __init__(self, model: Model, precision: str, threads: int) -> None:
        arena = Arena(model.config, NUM_PAGES, KV_DTYPE[precision])
        self.max_positions, self.vocab_size = model.config.max_positions, model.config.vocab_size
        self.pool = PagePool(arena)
        self.decoder = CpuDecoder(model.config, model.weights, arena, threads, precision=precision)
        self.computed_s = self.moved_s = 0.0
        self.num_computed = self.num_moved = 0

    def append(self, table: PageTable, tokens: Tokens, first: int, *, wanted: bool = False) -> Floats:
        rows = np.empty((len(tokens) if wanted else 0, self.vocab_size), np.float32)
        reservation = table.reserve(tokens, np.arange(first, first + len(tokens)))
        chunk = Chunk(
            reservation.tokens,
            reservation.positions,
            reservation.pages,
            reservation.start,
            tuple(memoryview(row) for row in rows),
        )
        began = time.perf_counter()
        copies = reservation.frame_copies().reshape(-1, 3).tolist()
        self.decoder.step(StepBatch((chunk,), tuple(map(tuple, copies))))
        if not wanted:
            self.computed_s += time.perf_counter() - began
            self.num_computed += len(tokens)
        reservation.commit_first(reservation.tokens)
        return rows

    def computed(self, tokens: Tokens, first: int = 0) -> PageTable:
        table = PageTable(self.pool, 0)
        if len(tokens):
            self.append(table, tokens, first)
        return table

    def picked(self, pieces: Sequence[tuple[PageTable, Sequence[tuple[int, int]]]], *, rebase: bool) -> PageTable:
        began = time.perf_counter()
        ranges = [Piece(table, np.array(own)) for table, own in pieces]
        made = assemble(self.pool, 0, ranges, rebase=rebase, max_positions=self.max_positions)
        self.moved_s += time.perf_counter() - began
        self.num_moved += made.length
        for table, _ in pieces:
            table.close()
        return made

    def scored(self, table: PageTable, following: Tokens) -> Floats:
        """The distributions after each of the following tokens; the file is gone then."""
        rows = self.append(table, following, table.next_position, wanted=True)
        table.close()
        assert self.pool.num_free == self.pool.num_pages
        return rows


def cases(bench: Bench, context: Tokens) -> Iterator[tuple[str, str, PageTable]]:
    """Of one text: name, which context it is compared with, and the file."""
    for shift in SHIFTS:
        moved = bench.picked([(bench.computed(context, shift), [(0, CONTEXT)])], rebase=True)
        yield f"moved by {shift}", "whole", moved
    for count in PIECES:
        for rebase, name in ((True, f"{count} joined"), (False, f"{count} joined, as is")):
            parts = [(bench.computed(part), [(0, len(part))]) for part in np.split(context, count)]
            yield name, "whole", bench.picked(parts, rebase=rebase)
    quarter = CONTEXT // 4
    kept = [(0, 2 * quarter), (3 * quarter, CONTEXT)]
    yield "middle left out", "rest", bench.picked([(bench.computed(context), kept)], rebase=True)
    yield "no context", "whole", bench.computed(context[:0])


def measure(bench: Bench, texts: Tokens, label: str) -> list[Score]:
    scores: dict[str, Score] = {"computed": Score("computed")}
    for index, text in enumerate(texts):
        context, following = text[:CONTEXT], text[CONTEXT:]
        rest = np.concatenate((context[: CONTEXT // 2], context[3 * CONTEXT // 4 :]))
        references = {
            "whole": bench.scored(bench.computed(context), following),
            "rest": bench.scored(bench.computed(rest), following),
        }
        scores["computed"].add(references["whole"], references["whole"], following[1:])
        for name, against, table in cases(bench, context):
            score = scores.setdefault(name, Score(name))
            score.add(references[against], bench.scored(table, following), following[1:])
        print(f"\r{label:10} {index + 1:3}/{len(texts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return list(scores.values())


def read_texts(model: Model, count: int) -> Tokens:
    """[count, CONTEXT + SCORED]: the beginnings of the first topics, by name, that are long enough."""
    texts = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    size = CONTEXT + SCORED
    return np.array([text[:size] for text in texts if len(text) >= size][:count], np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bf16"], choices=list(KV_DTYPE))
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    model = load_model(None)
    texts = read_texts(model, options.texts)
    results, speeds = [], {}
    for precision in options.precisions:
        bench = Bench(model, precision, options.threads)
        results += [score.row(precision) for score in measure(bench, texts, precision)]
        speeds[precision] = {
            "computed_tokens_per_s": bench.num_computed / bench.computed_s,
            "moved_tokens_per_s": bench.num_moved / bench.moved_s,
        }
        bench.decoder.close()
    print(f"{model.name}, {len(texts)} texts, {len(texts) * SCORED} rows a case, pages of {PAGE_ENTRIES} entries\n")
    print("| precision | context | mean KL | same greedy token | perplexity | largest logit error |")
    print("|---|---|---|---|---|---|")
    for row in results:
        figures = f"{row['kl']:.2g} | {100 * row['same']:.1f} % | {row['perplexity']:.3f} | {row['worst']:.2g}"
        print(f"| {row['precision']} | {row['case']} | {figures} |")
    for precision, speed in speeds.items():
        computed, moved = speed["computed_tokens_per_s"], speed["moved_tokens_per_s"]
        times = moved / computed
        print(f"\n{precision}: {moved:,.0f} tokens/s moved or joined, {times:.0f} times the {computed:,.0f} computed")
    if options.json:
        report = {"model": model.name, "results": results, "speeds": speeds}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
