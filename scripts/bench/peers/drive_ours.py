"""Drive Symphony's CPU decoder: steps, and greedy choice in numpy. Arguments: model, precision, threads, isa."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from protocol import FIRST_PROMPT, serve  # isort: skip
import numpy as np

from decoder.batch import Chunk, IntArray, StepBatch
from decoder.checkpoints.llama import EMBED, HEAD, layer_name
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from libsym.abi import PAGE_ENTRIES

ARENA_PAGES = 1024
"""Pages of the arena, enough for 64 sequences of a few hundred entries and a long prefix. Unused pages cost nothing."""

VALUE_BYTES = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 34 / 32}
"""Bytes of a weight by precision. The figure for int4 is that of matrices whose codes the file does not have, with a
float16 scale for each 32 codes of one byte.

The scales of int8, one for each row, are not counted.
"""


class Ours:
    def __init__(self, model: Model, precision: str, threads: int, isa: str | None) -> None:
        options: dict[str, Any] = {} if precision == "float32" else {"precision": precision}
        arena = Arena(model.config, ARENA_PAGES, KV_DTYPE[precision])
        self.decoder = CpuDecoder(model.config, model.weights, arena, threads, isa, **options)
        self.logits = np.zeros((64, model.config.vocab_size), np.float32)

    def step(self, tokens: IntArray, start: int, tables: IntArray, first_row: int = 0) -> IntArray:
        """Append tokens [batch, n] at entry `start`, and return the greedy token of each sequence."""
        batch, n = tokens.shape
        rows = self.logits[first_row : first_row + batch]
        positions = np.arange(start, start + n, dtype=np.int32)
        chunks = zip(tokens, tables, rows, strict=True)
        self.decoder.step(
            StepBatch(tuple(Chunk(ids, positions, table, start, (memoryview(row),)) for ids, table, row in chunks))
        )
        return rows.argmax(axis=1).astype(np.int32)

    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]:
        assert len(prefix) % PAGE_ENTRIES == 0, "the shared prefix ends within a page"
        shared = len(prefix) // PAGE_ENTRIES
        start, n = len(prefix), len(prompts[0])
        own = -(-(n + decodes) // PAGE_ENTRIES)
        pages = np.arange(shared + len(prompts) * own, dtype=np.int32)
        tables = np.hstack(
            [np.broadcast_to(pages[:shared], (len(prompts), shared)), pages[shared:].reshape(len(prompts), own)]
        )
        tables = np.ascontiguousarray(tables)
        ids = np.array(prompts, np.int32)
        if prefix:
            self.step(np.array([prefix], np.int32), 0, tables[:1])
        began, phases = time.perf_counter(), self.decoder.phase_seconds()
        tokens = np.concatenate([self.step(ids[i : i + 1], start, tables[i : i + 1], i) for i in range(len(prompts))])
        first = tokens.tolist()
        if decodes:
            began, phases = time.perf_counter(), self.decoder.phase_seconds()
        for i in range(decodes):
            tokens = self.step(tokens[:, None], start + n + i, tables)
        seconds = time.perf_counter() - began
        after = self.decoder.phase_seconds()
        return {"seconds": seconds, "first": first, "phases": {name: after[name] - phases[name] for name in after}}


def part_bytes(model: Model, precision: str) -> dict[str, float]:
    """Return the bytes of the matrices that a step reads, for each part, without padding."""

    def size(name: str) -> float:
        stored = model.weights.stored(name)
        if precision == "int4" and stored.encoding.coding is not None:
            return stored.data.nbytes
        return math.prod(stored.shape) * VALUE_BYTES[precision]

    fields = {"qkv": ("q", "k", "v"), "o": ("o",), "gate+up": ("gate", "up"), "down": ("down",)}
    parts = {
        part: sum(size(layer_name(layer, field)) for layer in range(model.config.num_layers) for field in names)
        for part, names in fields.items()
    }
    return parts | {"head": size(EMBED if model.config.tie_embeddings else HEAD)}


def load() -> tuple[Ours, dict[str, Any]]:
    spec, precision, threads, isa = sys.argv[1:]
    model = load_model(spec)
    ours = Ours(model, precision, int(threads), isa or None)
    ours.run([], [FIRST_PROMPT], 0)
    about = {
        "engine": f"Symphony {precision}, {ours.decoder.isa}",
        "model": model.name,
        "shape": dataclasses.asdict(model.config),
        "part_bytes": part_bytes(model, precision),
        "weight_bytes": ours.decoder.weight_bytes,
    }
    return ours, about


serve(load)
