#!/usr/bin/env python3
"""Cost of a draw from a row of 49,152 logits: the C part alone, and from Python. Times are in microseconds.

Rows: `sharp` as a model gives them where it is sure, `open` where it is not, `flat` nearly without a preference. The
nucleus of `flat` has tens of thousands of tokens: the worst case. A draw takes the next of `--rows` rows. More rows
come from memory that is further from the processor: 64 rows are 12 MiB.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import libsym as sym
from libsym._channel import ffi, lib
from libsym.rows.sampler import RowSampler

VOCAB_SIZE = 49_152
HISTORY = 2_000  # tokens that penalties look at

SHAPES = {  # spread of the logits; how many stand out, and by how much
    "sharp": (2.5, 60, 12.0),
    "open": (2.5, 400, 6.0),
    "flat": (1.0, 0, 0.0),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "1.5, top_p 0.95": {"temperature": 1.5, "top_p": 0.95},
    "typical_p 0.9": {"temperature": 0.8, "typical_p": 0.9},
    "mirostat 1": {"mirostat": sym.Mirostat(1)},
    "mirostat 2": {"mirostat": sym.Mirostat(2)},
    "DRY": {"temperature": 0.8, "dry": sym.Dry(breakers=())},
}
LONG = 100_000
TEXTS = {"one token": [7] * LONG, "a period of 100": list(range(100)) * (LONG // 100), "no repetition": None}
"""Tokens that DRY looks through in its own table; None: random ones."""
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
EXTRAS = ("", "+ penalties", "+ bitmask", "+ both")


def make_row(shape: str, seed: int) -> array[float]:
    rng = random.Random(seed)
    spread, num_peaks, height = SHAPES[shape]
    row = array("f", (rng.gauss(0, spread) for _ in range(VOCAB_SIZE)))
    for i in range(num_peaks):
        row[rng.randrange(VOCAB_SIZE)] += height * (1 - i / num_peaks) + 4
    return row


def timed(draw: Callable[[int], object], num_draws: int) -> list[float]:
    for i in range(num_draws // 10 + 10):
        draw(i)
    times_us = []
    for i in range(num_draws):
        start = time.perf_counter_ns()
        draw(i)
        times_us.append((time.perf_counter_ns() - start) / 1000)
    return sorted(times_us)


def measure(
    shape: str, rows: list[array[float]], settings: dict[str, Any], extra: str, num_draws: int
) -> dict[str, object]:
    rng = random.Random(0)
    penalties = PENALTIES if extra in ("+ penalties", "+ both") else {}
    sampler = sym.Sampler(seed=1, **settings, **penalties)
    history = [rng.randrange(VOCAB_SIZE) for _ in range(HISTORY)]
    allowed = rng.randbytes(VOCAB_SIZE // 8) if extra in ("+ bitmask", "+ both") else None
    num_rows = len(rows)

    block = sampler.block(before=history[: HISTORY // 2], generated=history[HISTORY // 2 :])
    bare = ffi.gc(lib.sym_sampler_new(block, len(block), VOCAB_SIZE, ffi.NULL), lib.sym_sampler_free)
    floats = [ffi.from_buffer("float[]", row) for row in rows]
    bits = ffi.NULL if allowed is None else ffi.from_buffer(allowed)
    in_c = timed(lambda i: lib.sym_sampler_draw(bare, floats[i % num_rows], bits, i), num_draws)

    # Without noting what is drawn: from the same few rows again and again, penalties would make them flat.
    rows_sampler = RowSampler(block, VOCAB_SIZE)
    dists = [sym.Dist.of(row) for row in rows]
    in_python = timed(lambda i: rows_sampler.draw(dists[i % num_rows].logits, i, allowed), num_draws)
    return {
        "row": shape,
        "extra": extra,
        "c_p50_us": round(in_c[len(in_c) // 2], 1),
        "c_p99_us": round(in_c[len(in_c) * 99 // 100], 1),
        "python_p50_us": round(in_python[len(in_python) // 2], 1),
        "python_p99_us": round(in_python[len(in_python) * 99 // 100], 1),
    }


def measure_repetitions(rows: list[array[float]], num_draws: int) -> list[dict[str, object]]:
    """DRY over long texts."""
    rng, table = random.Random(0), []
    for name, text in TEXTS.items():
        said = [rng.randrange(VOCAB_SIZE) for _ in range(LONG)] if text is None else text
        sampler = RowSampler(sym.Sampler(seed=1, dry=sym.Dry(breakers=())).block(said), VOCAB_SIZE)
        views = [sym.Dist.of(row).logits for row in rows]
        times_us = timed(
            lambda i, views=views, sampler=sampler: sampler.draw(views[i % len(views)], i), num_draws // 10 + 1
        )
        p50, p99 = times_us[len(times_us) // 2], times_us[len(times_us) * 99 // 100]
        table.append(
            {
                "row": "open",
                "case": f"DRY, {LONG:,} tokens, {name}",
                "python_p50_us": round(p50, 1),
                "python_p99_us": round(p99, 1),
            }
        )
    return table


def measure_questions(shape: str, rows: list[array[float]], num_draws: int) -> list[dict[str, object]]:
    """The other things that a Dist is asked."""
    dists = [sym.Dist.of(row) for row in rows]
    questions: dict[str, Callable[[sym.Dist], object]] = {
        "argmax()": lambda dist: dist.argmax(),
        "logprob()": lambda dist: dist.logprob(7),
        "entropy()": lambda dist: dist.entropy(),
        "topk(50)": lambda dist: dist.topk(50),
        "probs()": lambda dist: dist.probs(),
        "sample(top_p=0.9)": lambda dist: dist.sample(top_p=0.9, seed=1),
    }
    table = []
    for name, ask in questions.items():
        times_us = timed(lambda i, ask=ask: ask(dists[i % len(dists)]), num_draws)
        p50, p99 = times_us[len(times_us) // 2], times_us[len(times_us) * 99 // 100]
        table.append({"row": shape, "case": name, "python_p50_us": round(p50, 1), "python_p99_us": round(p99, 1)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what drawing a token costs.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--draws", type=int, default=2000, help="draws for each row of the table")
    parser.add_argument("--rows", type=int, default=2, help="rows of logits that take turns; 64 do not fit a cache")
    parser.add_argument("--vector-bits", type=int, choices=(0, 256, 512), help="only the instructions of this width")
    args = parser.parse_args()
    if args.vector_bits is not None and lib.sym_rows_use(args.vector_bits) != 0:
        raise SystemExit(f"this processor has no vectors of {args.vector_bits} bits")
    draws: list[dict[str, object]] = []
    questions: list[dict[str, object]] = []
    for shape in SHAPES:
        rows = [make_row(shape, seed) for seed in range(args.rows)]
        for name, settings in SETTINGS.items():
            draws.extend({"case": name, **measure(shape, rows, settings, extra, args.draws)} for extra in EXTRAS)
        questions.extend(measure_questions(shape, rows, args.draws))
    questions.extend(measure_repetitions([make_row("open", seed) for seed in range(args.rows)], args.draws))
    if args.json:
        print(json.dumps({"draws": draws, "questions": questions}, indent=2))
        return
    print(f"{'row':7}{'case':22}{'':14}{'C p50':>8}{'p99':>8}{'Python p50':>12}{'p99':>8}")
    for row in draws:
        print("{row:7}{case:22}{extra:14}{c_p50_us:>8}{c_p99_us:>8}{python_p50_us:>12}{python_p99_us:>8}".format(**row))
    print(f"\n{'row':7}{'question':36}{'':16}{'Python p50':>12}{'p99':>8}")
    for row in questions:
        print("{row:7}{case:36}{python_p50_us:>28}{python_p99_us:>8}".format(**row))


if __name__ == "__main__":
    main()
