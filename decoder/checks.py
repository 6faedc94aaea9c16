"""Checks that every backend makes before it computes. In a checked batch, all indices are in range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder.batch import BoolArray, Chunk, IntArray, MassArray, StepBatch
from decoder.model_config import ModelConfig
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid

Words = npt.NDArray[np.uint32]

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """A batch after its checks, with the chunks' arrays joined."""

    tokens: IntArray
    positions: IntArray
    pages: IntArray
    """Page tables of all chunks, each cut to the pages that hold entries below the chunk's end."""
    lengths: list[int]
    """Number of tokens of each chunk."""
    used: list[int]
    """Number of pages of each chunk in `pages`."""
    copies: IntArray
    """[copies, 3]: source, target, entries."""
    masks: list[Words | None]
    """Each chunk's mask as words [rows, pages], with a bit for each entry of the page; None: the chunk has no mask."""


def check_batch(batch: StepBatch, config: ModelConfig, num_pages: int) -> CheckedBatch:
    """Check a batch and join its arrays. ValueError: an index or a shape is wrong."""
    chunks = batch.chunks
    used = [_pages_used(chunk) for chunk in chunks]
    checked = CheckedBatch(
        tokens=_joined([chunk.tokens for chunk in chunks]),
        positions=_joined([chunk.positions for chunk in chunks]),
        pages=_joined([chunk.pages[:count] for chunk, count in zip(chunks, used, strict=True)]),
        lengths=[len(chunk.tokens) for chunk in chunks],
        used=used,
        copies=np.array(batch.copies, dtype=np.int32).reshape(-1, 3),
        masks=[None if chunk.mask is None else _mask_words(chunk, chunk.mask) for chunk in chunks],
    )
    _check_range("token", checked.tokens, config.vocab_size)
    _check_range("position", checked.positions, config.max_positions)
    _check_range("page", checked.pages, num_pages)
    _check_range("page to copy", checked.copies[:, :2].reshape(-1), num_pages)
    _check_range("number of entries to copy", checked.copies[:, 2], PAGE_ENTRIES + 1)
    for chunk in chunks:
        for row in chunk.rows:
            _check_row(row, config.vocab_size)
        if chunk.mass is not None:
            _check_mass(chunk, chunk.mass, config)
    return checked


def check_shape(config: ModelConfig) -> None:
    """Raise Invalid if the backends have no kernels for the model's shape."""
    if config.head_dim % 16 or not 16 <= config.head_dim <= _MAX_HEAD_DIM:
        raise Invalid(f"{config.name}: head_dim {config.head_dim} is not a multiple of 16 from 16 to {_MAX_HEAD_DIM}")
    if config.num_heads % config.num_kv_heads:
        raise Invalid(f"{config.name}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    for name, size in (("hidden_size", config.hidden_size), ("ffn_size", config.ffn_size)):
        if size % 16:
            raise Invalid(f"{config.name}: {name} {size} is not a multiple of 16")


def _pages_used(chunk: Chunk) -> int:
    """Check a chunk's shape, and return the number of pages that hold the entries below its end."""
    length = len(chunk.tokens)
    if length < 1 or len(chunk.positions) != length:
        raise ValueError(
            f"a chunk has {length} tokens and {len(chunk.positions)} positions: give one for each, at least one"
        )
    if len(chunk.rows) not in {0, 1, length}:
        raise ValueError(
            f"a chunk of {length} tokens has {len(chunk.rows)} rows: give none, one, or one for each token"
        )
    count = -(-(chunk.start + length) // PAGE_ENTRIES)
    if chunk.start < 0 or count > len(chunk.pages):
        raise ValueError(
            f"entries {chunk.start} to {chunk.start + length} do not fit a table of {len(chunk.pages)} pages"
        )
    return count


def _mask_words(chunk: Chunk, mask: BoolArray) -> Words:
    rows, entries = len(chunk.tokens), chunk.start + len(chunk.tokens)
    if mask.shape != (rows, entries):
        raise ValueError(f"a mask of shape {mask.shape} for {rows} rows over {entries} entries")
    if not mask[np.arange(rows), chunk.start + np.arange(rows)].all():
        raise ValueError("a mask hides a row's own entry: every row must see itself")
    padded = np.zeros((rows, -(-entries // PAGE_ENTRIES) * PAGE_ENTRIES), np.uint8)
    padded[:, :entries] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    """Join arrays into one contiguous int32 array. A single array that has this form is not copied."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype=np.int32)
    return np.concatenate(arrays, dtype=np.int32) if arrays else np.empty(0, dtype=np.int32)


def _check_range(what: str, values: IntArray, limit: int) -> None:
    # Read as unsigned, a negative number is larger than any limit. So one comparison finds both errors.
    if values.size and int(values.view(np.uint32).max()) >= limit:
        bad = next(int(value) for value in values if not 0 <= value < limit)
        raise ValueError(f"{what} {bad} is outside 0 .. {limit - 1}")


def _check_row(row: memoryview[float], vocab_size: int) -> None:
    if row.format != "f" or row.nbytes != 4 * vocab_size or row.readonly:
        raise ValueError(
            f"a row is {row.nbytes} {'read-only ' if row.readonly else ''}bytes of format {row.format!r}: give "
            f"{vocab_size} writable floats"
        )


def _check_mass(chunk: Chunk, mass: MassArray, config: ModelConfig) -> None:
    least = (config.num_layers, config.num_kv_heads, chunk.start + len(chunk.tokens))
    is_sound = mass.dtype == np.float32 and mass.flags.c_contiguous and mass.flags.writeable
    if not is_sound or mass.ndim != len(least) or mass.shape[:2] != least[:2] or mass.shape[2] < least[2]:
        raise ValueError(f"a mass of {mass.dtype} {mass.shape}: give writable floats in order, {least} or more entries")
