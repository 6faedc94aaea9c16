"""The CPU decoder: a batch is checked and laid out here, then computed by one C call that holds no lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from decoder.arena import Arena
from decoder.batch import BoolArray, Chunk, IntArray, NativeStep, StepBatch
from decoder.config import KV_DTYPE, ModelConfig
from decoder.cpu._step import ffi, lib
from decoder.cpu.cores import available_cores
from decoder.cpu.packing import pack_weights
from decoder.rope import inverse_frequencies, rotation_factor
from decoder.weights import Weights
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid

SOLO_WORK = 1 << 20
"""Multiply-adds below which a step stays on the caller's thread: waking another takes some 50 µs."""

_MAX_HEAD_DIM = 256
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class CpuDecoder:
    """Runs steps of one model in one precision over the pages of an arena.

    The same call gives the same bits, alone or in any batch, however its prefill was chunked, with any number
    of threads. `step` is for one thread at a time; the threads of the pool belong to the decoder.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arena: Arena,
        num_threads: int | None = None,
        isa: str | None = None,
        *,
        precision: str = "float32",
        solo_work: int = SOLO_WORK,
    ) -> None:
        _check_shape(config)
        if precision not in KV_DTYPE:
            raise Invalid(f"precision {precision!r} is not one of {', '.join(KV_DTYPE)}")
        if arena.dtype != KV_DTYPE[precision]:
            raise Invalid(f"precision {precision} needs an arena of {KV_DTYPE[precision]}, this one is {arena.dtype}")
        self.config = config
        self.arena = arena
        self.num_threads = available_cores() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise Invalid(f"num_threads is {num_threads}: give at least 1")
        self.isa = choose_isa(isa)
        self.precision = precision
        self._packed = pack_weights(config, weights, precision)
        self._frequencies = [inverse_frequencies(config, local) for local in (False, True)]
        model = ffi.new("sym_model *")
        model.shape = {
            "vocab": config.vocab_size,
            "hidden": config.hidden_size,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "ffn": config.ffn_size,
            "activation": _ACTIVATIONS[config.activation],
            "window": config.window,
            "kv_format": lib.SYM_FLOAT32 if arena.dtype == "F32" else lib.SYM_BFLOAT16,
            "rms_eps": config.rms_eps,
            "embed_scale": config.embed_scale,
            "attn_scale": config.score_scale,
            "attn_softcap": config.attn_softcap,
            "final_softcap": config.final_softcap,
        }
        model.layers = self._packed.layers
        model.embed, model.head = self._packed.embed[0], self._packed.head[0]
        model.final_norm = self._packed.final_norm
        for local in (False, True):
            model.frequencies[local] = ffi.cast("double *", self._frequencies[local].ctypes.data)
            model.rotation_factors[local] = rotation_factor(config, local)
        model.arena = ffi.cast("char *", arena.pages.ctypes.data)
        self._decoder = lib.sym_decoder_new(model, self.num_threads, self.isa.encode(), solo_work)
        if self._decoder == ffi.NULL:
            raise OSError(
                ffi.errno, f"the CPU decoder cannot start {self.num_threads} threads: {os.strerror(ffi.errno)}"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads at least: memory bandwidth over this is the limit at batch 1."""
        return self._packed.num_bytes

    def step(self, batch: StepBatch) -> None:
        """One forward pass: KV goes into the batch's pages, logits into its rows."""
        assert self._decoder is not None, "step() after close()"
        if not batch.chunks and not batch.copies:
            return
        laid_out, keep = self._lay_out(batch)
        error = lib.sym_step(self._decoder, laid_out)
        del keep  # the arrays that the C structure pointed into
        if error:
            raise OSError(error, f"a step of {batch.num_tokens} tokens failed: {os.strerror(error)}")

    @property
    def native(self) -> NativeStep:
        """The step itself, for a loop of steps in C; the batch is the caller's to check."""
        function = ffi.addressof(lib, "sym_step")
        return NativeStep(int(ffi.cast("uintptr_t", function)), int(ffi.cast("uintptr_t", self._decoder)))

    def close(self) -> None:
        """Stops the threads and gives the memory back."""
        if self._decoder is not None:
            lib.sym_decoder_free(self._decoder)
            self._decoder = None

    def phase_seconds(self) -> dict[str, float]:
        """Where the time of all steps so far went, as the calling thread saw it."""
        return {
            ffi.string(lib.sym_phase_name(phase)).decode(): lib.sym_phase_ns(self._decoder, phase) * 1e-9
            for phase in range(lib.sym_num_phases())
        }

    @property
    def shared_rows(self) -> int:
        """Rows of the last step that read pages together with another file's."""
        return int(lib.sym_shared_rows(self._decoder))

    def _lay_out(self, batch: StepBatch) -> tuple[Any, Any]:
        chunks = batch.chunks
        lengths = [len(chunk.tokens) for chunk in chunks]
        used = [_pages_used(chunk) for chunk in chunks]
        tokens = _joined([chunk.tokens for chunk in chunks])
        positions = _joined([chunk.positions for chunk in chunks])
        pages = _joined([chunk.pages[:count] for chunk, count in zip(chunks, used, strict=True)])
        copies = np.array(batch.copies, dtype=np.int32).reshape(-1)
        _check_range("token", tokens, self.config.vocab_size)
        _check_range("position", positions, self.config.max_positions)
        _check_range("page", pages, self.arena.num_pages)
        _check_range("page to copy", copies, self.arena.num_pages)
        vocab = self.config.vocab_size
        rows = [_row_pointer(row, vocab) for chunk in chunks for row in chunk.rows]
        words = [None if chunk.mask is None else _mask_words(chunk, chunk.mask) for chunk in chunks]
        masks = ffi.new("uint32_t *[]", [ffi.NULL if word is None else _address(word) for word in words])
        index: list[IntArray] = [
            np.array([0, *np.cumsum(lengths)], dtype=np.int32),
            np.array([chunk.start for chunk in chunks], dtype=np.int32),
            np.array([0, *np.cumsum(used)], dtype=np.int32),
            np.array([len(chunk.rows) for chunk in chunks], dtype=np.int32),
        ]
        out = ffi.new("float *[]", rows)
        first_row, start, first_page, wanted = (_ints(array) for array in index)
        laid_out = ffi.new(
            "sym_batch *",
            {
                "num_rows": len(tokens),
                "num_chunks": len(chunks),
                "num_wanted": len(rows),
                "num_copies": len(batch.copies),
                "tokens": _ints(tokens),
                "positions": _ints(positions),
                "first_row": first_row,
                "start": start,
                "first_page": first_page,
                "pages": _ints(pages),
                "wanted": wanted,
                "masks": masks,
                "out": out,
                "copies": _ints(copies),
            },
        )
        return laid_out, (tokens, positions, pages, copies, index, words, masks, rows, out)


def _check_shape(config: ModelConfig) -> None:
    if config.head_dim % 16 or not 16 <= config.head_dim <= _MAX_HEAD_DIM:
        raise Invalid(f"{config.name}: head_dim {config.head_dim} is not a multiple of 16 from 16 to {_MAX_HEAD_DIM}")
    if config.num_heads % config.num_kv_heads:
        raise Invalid(f"{config.name}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    for name, size in (("hidden_size", config.hidden_size), ("ffn_size", config.ffn_size)):
        if size % 16:
            raise Invalid(f"{config.name}: {name} {size} is not a multiple of 16")


def choose_isa(wanted: str | None) -> str:
    """The instruction set of that name, or the best one of this machine."""
    chosen = lib.sym_isa(ffi.NULL if wanted is None else wanted.encode())
    if chosen == ffi.NULL:
        raise Invalid(f"this machine cannot run instruction set {wanted!r}: leave it out, or give 'plain'")
    name: str = ffi.string(chosen).decode()
    return name


def _pages_used(chunk: Chunk) -> int:
    """Pages that hold the entries below the chunk's end; the chunk's own shape is checked on the way."""
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


def _mask_words(chunk: Chunk, mask: BoolArray) -> npt.NDArray[np.uint32]:
    """A bit for each entry, a word for each page: [rows, pages]."""
    rows, entries = len(chunk.tokens), chunk.start + len(chunk.tokens)
    if mask.shape != (rows, entries):
        raise ValueError(f"a mask of shape {mask.shape} for {rows} rows over {entries} entries")
    if not mask[np.arange(rows), chunk.start + np.arange(rows)].all():
        raise ValueError("a mask hides a row's own entry: every row must see itself")
    padded = np.zeros((rows, -(-entries // PAGE_ENTRIES) * PAGE_ENTRIES), np.uint8)
    padded[:, :entries] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def _address(words: npt.NDArray[np.uint32]) -> Any:
    return ffi.cast("uint32_t *", words.ctypes.data)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    """One contiguous int32 array; a chunk alone is passed on as it is."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype=np.int32)
    return np.concatenate(arrays, dtype=np.int32) if arrays else np.empty(0, dtype=np.int32)


def _check_range(what: str, values: npt.NDArray[np.int32], limit: int) -> None:
    # As unsigned numbers, negative ones are large: one comparison finds both.
    if values.size and int(values.view(np.uint32).max()) >= limit:
        bad = next(int(value) for value in values if not 0 <= value < limit)
        raise ValueError(f"{what} {bad} is outside 0 .. {limit - 1}")


def _row_pointer(row: memoryview[float], vocab_size: int) -> Any:
    if row.format != "f" or row.nbytes != 4 * vocab_size:
        raise ValueError(f"a row is {row.nbytes} bytes of format {row.format!r}: give {vocab_size} writable floats")
    return ffi.from_buffer("float[]", row, require_writable=True)


def _ints(array: IntArray) -> Any:
    return ffi.cast("int32_t *", array.ctypes.data)
