"""A small bench for decoders: files with shuffled pages over an arena, and steps over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model_config import KV_DTYPE, ModelConfig
from decoder.reference import ReferenceDecoder
from decoder.tiny import random_weights, tiny_config

Floats = npt.NDArray[np.float32]


@dataclass
class File:
    """A page table and its length, as kvfs would keep them."""

    pages: npt.NDArray[np.int32]
    length: int = 0


@dataclass
class Call:
    """What one pred() asks of a step."""

    file: File
    tokens: Sequence[int]
    rows: str = "all"
    positions: Sequence[int] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    out: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))


class Bench:
    """One decoder, its arena, and pages that nobody has taken yet."""

    def __init__(self, config: ModelConfig, decoder: Any, arena: Arena, seed: int = 0) -> None:
        self.config, self.decoder, self.arena = config, decoder, arena
        self._free = list(np.random.default_rng(seed).permutation(arena.num_pages))

    def file(self, max_entries: int) -> File:
        return File(np.array([self._free.pop() for _ in range(-(-max_entries // 32))], dtype=np.int32))

    def step(self, *calls: Call, copies: Sequence[tuple[int, int]] = ()) -> list[Floats]:
        """Runs the calls as one batch; the logits of each, [rows, vocab]."""
        chunks = []
        for call in calls:
            n, start = len(call.tokens), call.file.length
            positions = range(start, start + n) if call.positions is None else call.positions
            num_rows = {"none": 0, "last": 1, "all": n}[call.rows]
            call.out = np.full((num_rows, self.config.vocab_size), np.nan, np.float32)
            chunks.append(
                Chunk(
                    tokens=np.array(call.tokens, dtype=np.int32),
                    positions=np.array(positions, dtype=np.int32),
                    pages=call.file.pages,
                    start=start,
                    rows=tuple(memoryview(row) for row in call.out),
                    mask=call.mask,
                )
            )
            call.file.length += n
        self.decoder.step(StepBatch(tuple(chunks), tuple(copies)))
        return [call.out for call in calls]

    def prefill(self, tokens: Sequence[int], piece: int | None = None, *, reserve: int = 0) -> tuple[File, Floats]:
        """A new file of these tokens, a step for each piece; every row's logits."""
        file = self.file(len(tokens) + reserve)
        piece = len(tokens) if piece is None else piece
        outs = [self.step(Call(file, tokens[i : i + piece]))[0] for i in range(0, len(tokens), piece)]
        return file, np.concatenate(outs)


@pytest.fixture
def cpu_bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches with a CPU decoder each; keyword arguments other than these are the config's."""
    decoders: list[CpuDecoder] = []

    def make(
        *,
        threads: int = 2,
        isa: str | None = None,
        precision: str = "float32",
        weights: Weights | None = None,
        num_pages: int = 64,
        seed: int = 0,
        **shape: Any,
    ) -> Bench:
        config = tiny_config(**shape)
        arena = Arena(config, num_pages, KV_DTYPE[precision])
        weights = weights or _weights(config)
        # solo_work=0: even the smallest step meets its other threads.
        decoders.append(CpuDecoder(config, weights, arena, threads, isa, precision=precision, solo_work=0))
        return Bench(config, decoders[-1], arena, seed)

    yield make
    for decoder in decoders:
        decoder.close()


@pytest.fixture
def reference_bench() -> Callable[..., Bench]:
    """Makes benches with a reference decoder each."""

    def make(*, weights: Weights | None = None, num_pages: int = 64, seed: int = 0, **shape: Any) -> Bench:
        config = tiny_config(**shape)
        arena = Arena(config, num_pages)
        return Bench(config, ReferenceDecoder(config, weights or _weights(config), arena), arena, seed)

    return make


@pytest.fixture(scope="session")
def new_bench() -> type[Bench]:
    return Bench


@pytest.fixture
def new_call() -> type[Call]:
    return Call


def _weights(config: ModelConfig) -> Weights:
    return random_weights(config, seed=7)
