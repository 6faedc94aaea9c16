"""A small bench for decoders: files with shuffled pages over an arena, and steps over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cpu import backend
from decoder.model_config import ModelConfig
from libsym.errors import Invalid

Floats = npt.NDArray[np.float32]


@dataclass
class File:
    """A page table and its length, as kvfs would keep them."""

    pages: npt.NDArray[np.int32]
    length: int = 0


@dataclass
class Call:
    file: File
    tokens: Sequence[int]
    rows: str = "all"
    positions: Sequence[int] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    mass: Floats | None = None
    out: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))


class Bench:
    """A decoder, its arena, and pages that nobody has taken yet."""

    def __init__(self, config: ModelConfig, decoder: Any, arena: Any, seed: int = 0) -> None:
        self.config, self.decoder, self.arena = config, decoder, arena
        self._free = list(np.random.default_rng(seed).permutation(arena.num_pages))

    def file(self, max_entries: int) -> File:
        return File(np.array([self._free.pop() for _ in range(-(-max_entries // 32))], dtype=np.int32))

    def step(self, *calls: Call, copies: Sequence[tuple[int, int, int]] = ()) -> list[Floats]:
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
                    mass=call.mass,
                )
            )
            call.file.length += n
        self.decoder.step(StepBatch(tuple(chunks), tuple(copies)))
        return [call.out for call in calls]

    def grown(self, base: File, tokens: Sequence[int]) -> File:
        """A file that shares the whole pages of another, and goes on with these tokens in pages of its own."""
        shared, own = base.pages[: base.length // 32], self.file(len(tokens) + 8).pages
        file = File(np.concatenate([shared, own]).astype(np.int32), 32 * len(shared))
        self.step(Call(file, tokens, "none"))
        return file

    def no_mass(self, num_entries: int) -> Floats:
        return np.zeros((self.config.num_layers, self.config.num_kv_heads, num_entries), np.float32)

    def prefill(self, tokens: Sequence[int], piece: int | None = None, *, reserve: int = 0) -> tuple[File, Floats]:
        """A new file of these tokens, a step for each piece; every row's logits."""
        file = self.file(len(tokens) + reserve)
        piece = len(tokens) if piece is None else piece
        outs = [self.step(Call(file, tokens[i : i + piece]))[0] for i in range(0, len(tokens), piece)]
        return file, np.concatenate(outs)


def copy_of(bench: Bench, file: File) -> File:
    """The file in other pages, as an export and an import leave them: behind its entries there are zeros."""
    copy = File(bench.file(32 * len(file.pages)).pages, file.length)
    for index, (source, target) in enumerate(zip(file.pages.tolist(), copy.pages.tolist(), strict=True)):
        entries = max(0, min(32, file.length - 32 * index))
        bench.arena.writable(target)[:] = bench.arena.masked(bench.arena.view(source), entries)
    return copy


def forks_of(bench: Bench, lengths: Sequence[int], shared: int) -> list[File]:
    """Files that begin with the pages of one prefix, as forks do, and go on each on its own."""
    base, _ = bench.prefill(tokens_of(shared))
    return [bench.grown(base, tokens_of(length, seed=50 + index)) for index, length in enumerate(lengths)]


def chunk(**changes: Any) -> Chunk:
    """Two tokens of an empty file, of which a row is wanted."""
    row: Any = np.zeros(259, np.float32)
    rows = (memoryview(row),)
    lists: Any = {
        name: np.array(changes.pop(name, [1, 2]), dtype=np.int32) for name in ("tokens", "positions", "pages")
    }
    return Chunk(**lists, start=changes.pop("start", 0), rows=changes.pop("rows", rows), **changes)


def assert_close(got: Floats, expected: Floats, *, tolerance: float = 1e-4) -> None:
    """Within a share of the largest number."""
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()


def ints(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def tokens_of(n: int, seed: int = 3, vocab: int = 259) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def require(isa: str) -> None:
    try:
        backend.choose_isa(isa)
    except Invalid as error:
        pytest.skip(str(error))
