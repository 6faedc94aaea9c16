"""A decoder's step in Python, in the form that the run in C calls: for decoders without a step in C, as on a GPU.

C calls one function for all such steps, and passes a handle of the step in place of the decoder. The arrays of a batch
(`steps.h`) are copied, because a decoder may keep page tables and the run reuses its arrays. Rows are views of memory
at addresses from C, and are valid until the step returns.
"""

from __future__ import annotations

import errno
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoder.batch import BoolArray, Chunk, IntArray, MassArray, NativeStep, StepBatch
from libsym.abi import PAGE_ENTRIES
from scheduler._loop import ffi, lib


class CallbackStep:
    """Step of the run that calls `step`. An exception fails the step with EIO; `take_failure` returns it."""

    def __init__(self, step: Callable[[StepBatch], None], vocab_size: int) -> None:
        self._called = _Called(step, vocab_size)
        self._handle: Any = ffi.new_handle(self._called)
        address = _address(lib.sym_callback_step)
        self.native = NativeStep(address, _address(self._handle), take_failure=self._called.take_failure)
        """Step for the run, valid as long as this object."""


@dataclass(slots=True)
class _Called:
    """Object behind C's handle. `CallbackStep` is another object, so that no cycle of references keeps both alive."""

    step: Callable[[StepBatch], None]
    vocab_size: int
    failure: BaseException | None = None

    def take_failure(self) -> BaseException | None:
        """Return the exception. Its frames are emptied, because their variables may refer to rows that are gone."""
        failure, self.failure = self.failure, None
        return failure


def _step(handle: Any, batch: Any) -> int:
    called: _Called = ffi.from_handle(ffi.cast("void *", handle))
    try:
        called.step(_batch_of(batch, called.vocab_size))
    except BaseException as failure:  # noqa: BLE001 - C can't pass it on: `Ends` takes it by `take_failure`
        _empty_frames(failure)
        called.failure = failure
        return errno.EIO
    return 0


ffi.def_extern(name="sym_callback_step", error=errno.EIO)(_step)


def _empty_frames(failure: BaseException) -> None:
    link: BaseException | None = failure
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _batch_of(batch: Any, vocab_size: int) -> StepBatch:
    count = batch.num_chunks
    first_row, first_page = (_ints(each, count + 1).tolist() for each in (batch.first_row, batch.first_page))
    start, wanted = (_ints(each, count).tolist() for each in (batch.start, batch.wanted))
    tokens, positions = (_ints(each, batch.num_rows) for each in (batch.tokens, batch.positions))
    pages = _ints(batch.pages, first_page[-1])
    rows = [_row(batch.out[index], vocab_size) for index in range(batch.num_wanted)]
    chunks = []
    num_before = 0
    for index in range(count):
        first, end = first_row[index], first_row[index + 1]
        table = pages[first_page[index] : first_page[index + 1]]
        own = tuple(rows[num_before : num_before + wanted[index]])
        num_before += len(own)
        mask = _mask(batch.masks[index], end - first, len(table), start[index])
        mass = None if batch.masses == ffi.NULL else _mass(batch.masses[index])
        chunks.append(Chunk(tokens[first:end], positions[first:end], table, start[index], own, mask, mass))
    copies = _ints(batch.copies, 3 * batch.num_copies).reshape(-1, 3).tolist()
    return StepBatch(tuple(chunks), tuple((source, target, count) for source, target, count in copies))


def _row(out: Any, vocab_size: int) -> memoryview[float]:
    return memoryview(ffi.buffer(out, 4 * vocab_size)).cast("f")


def _mask(words: Any, num_rows: int, num_pages: int, start: int) -> BoolArray | None:
    """Unpack a mask to [rows, start + rows]. C has a word of bits for each page in each row."""
    if words == ffi.NULL:
        return None
    packed = np.frombuffer(ffi.buffer(words, 4 * num_rows * num_pages), np.uint8)
    bits = np.unpackbits(packed.reshape(num_rows, num_pages * PAGE_ENTRIES // 8), axis=1, bitorder="little")
    return bits[:, : start + num_rows].view(np.bool_)


def _mass(mass: Any) -> MassArray | None:
    """Return a view of the run's array, which the step adds to; None: this chunk asks for no attention."""
    if mass.sums == ffi.NULL:
        return None
    shape = (mass.layers, mass.kv_heads, mass.columns)
    return np.frombuffer(ffi.buffer(mass.sums, 4 * math.prod(shape)), np.float32).reshape(shape)


def _ints(pointer: Any, count: int) -> IntArray:
    if count == 0:
        return np.empty(0, np.int32)  # the pointer may be NULL
    return np.frombuffer(ffi.buffer(pointer, 4 * count), np.int32).copy()


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
