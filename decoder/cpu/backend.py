"""The CPU decoder. Python checks a batch and lays it out. One C call, without the interpreter's lock, computes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from decoder.batch import IntArray, MassArray, NativeStep, StepBatch
from decoder.checkpoints.weights import Weights
from decoder.checks import Words, check_batch, check_shape
from decoder.cores import available_cores
from decoder.cpu._step import ffi, lib
from decoder.cpu.arena import Arena
from decoder.cpu.packed_weights import check_weights, pack_weights
from decoder.model_config import KV_DTYPE, ModelConfig
from decoder.rope import inverse_frequencies, rotation_factor
from libsym.errors import Invalid

SOLO_WORK = 1 << 20
"""A step of fewer multiply-adds runs on the caller's thread alone. (Waking another thread takes some 50 µs.)"""

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class CpuDecoder:
    """The CPU decoder: computes steps of one model in one precision over the pages of an arena.

    A call gives the same bits alone or in any batch, for any chunks of its prefill, with any number of threads. One
    thread at a time may call `step`. The decoder has a pool of threads of its own.
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
        checkpoint: Callable[[float], None] = lambda _share: None,
        cache_directory: Path | None = None,
    ) -> None:
        """Pack the weights, and start the threads. `pack_weights` describes `checkpoint` and `cache_directory`."""
        check_shape(config)
        if precision not in KV_DTYPE:
            raise Invalid(f"precision {precision!r} is not one of {', '.join(KV_DTYPE)}")
        if arena.dtype != KV_DTYPE[precision]:
            raise Invalid(f"precision {precision} needs an arena of {KV_DTYPE[precision]}, not of {arena.dtype}")
        self.config = config
        self.arena = arena
        self.num_threads = available_cores() if num_threads is None else num_threads
        _check_threads(self.num_threads)
        self.isa = choose_isa(isa)
        self._packed = pack_weights(
            config, weights, precision, checkpoint, cache_directory=cache_directory, isa=self.isa
        )
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
        """Return the bytes of weights that a step reads. Steps a second are at most memory bandwidth / this number."""
        return self._packed.num_bytes

    def step(self, batch: StepBatch) -> None:
        """Compute one forward pass. Write K and V into the batch's pages, and logits into its rows."""
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
        """Return the addresses of the step's functions, for a loop in C. The loop must check each batch."""
        addresses = (ffi.addressof(lib, "sym_step"), self._decoder, ffi.addressof(lib, "sym_parallel"))
        return NativeStep(*(int(ffi.cast("uintptr_t", each)) for each in addresses))

    def keep(self) -> None:
        """Keep packed weights that are not in the cache yet. It takes seconds; another thread may call `step`."""
        self._packed.keep()

    @property
    def make_room(self) -> Callable[[], object] | None:
        """Return the function that removes kept weights while the disk is nearly full. None: none are kept."""
        return self._packed.make_room

    def close(self) -> None:
        """Stop the threads, and free the memory."""
        if self._decoder is not None:
            lib.sym_decoder_free(self._decoder)
            self._decoder = None

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds that the calling thread has spent in each phase of all steps."""
        return {
            ffi.string(lib.sym_phase_name(phase)).decode(): lib.sym_phase_ns(self._decoder, phase) * 1e-9
            for phase in range(lib.sym_num_phases())
        }

    @property
    def shared_rows(self) -> int:
        """Return the number of rows of the last step that read pages together with rows of other files."""
        return int(lib.sym_shared_rows(self._decoder))

    def _lay_out(self, batch: StepBatch) -> tuple[Any, Any]:
        chunks, checked = batch.chunks, check_batch(batch, self.config, self.arena.num_pages)
        rows = [ffi.from_buffer("float[]", row, require_writable=True) for chunk in chunks for row in chunk.rows]
        masks = ffi.new("uint32_t *[]", [ffi.NULL if mask is None else _address(mask) for mask in checked.masks])
        index: list[IntArray] = [
            np.array([0, *np.cumsum(checked.lengths)], dtype=np.int32),
            np.array([chunk.start for chunk in chunks], dtype=np.int32),
            np.array([0, *np.cumsum(checked.used)], dtype=np.int32),
            np.array([len(chunk.rows) for chunk in chunks], dtype=np.int32),
        ]
        out = ffi.new("float *[]", rows)
        masses = ffi.new("sym_mass[]", [_mass(chunk.mass) for chunk in chunks])
        first_row, start, first_page, wanted = (_ints(array) for array in index)
        laid_out = ffi.new(
            "sym_batch *",
            {
                "num_rows": len(checked.tokens),
                "num_chunks": len(chunks),
                "num_wanted": len(rows),
                "num_copies": len(batch.copies),
                "tokens": _ints(checked.tokens),
                "positions": _ints(checked.positions),
                "first_row": first_row,
                "start": start,
                "first_page": first_page,
                "pages": _ints(checked.pages),
                "wanted": wanted,
                "masks": masks,
                "out": out,
                "copies": _ints(checked.copies),
                "masses": masses,
            },
        )
        return laid_out, (checked, index, masks, rows, out, masses)


def check(config: ModelConfig, weights: Weights, num_threads: int, precision: str) -> None:
    """Raise the errors of `CpuDecoder` that can be found without reading the weights."""
    check_shape(config)
    _check_threads(num_threads)
    check_weights(config, weights, precision)


def _check_threads(num_threads: int) -> None:
    if num_threads < 1:
        raise Invalid(f"num_threads is {num_threads}: give at least 1")


def choose_isa(wanted: str | None = None) -> str:
    """Return the name of the instruction set `wanted`, or of this machine's best set if `wanted` is None."""
    chosen = lib.sym_isa(ffi.NULL if wanted is None else wanted.encode())
    if chosen == ffi.NULL:
        raise Invalid(f"this machine cannot run instruction set {wanted!r}: leave it out, or give 'plain'")
    name: str = ffi.string(chosen).decode()
    return name


def _address(words: Words) -> Any:
    return ffi.cast("uint32_t *", words.ctypes.data)


def _mass(mass: MassArray | None) -> tuple[Any, int, int, int]:
    return (ffi.NULL, 0, 0, 0) if mass is None else (ffi.cast("float *", mass.ctypes.data), *mass.shape)


def _ints(array: IntArray) -> Any:
    return ffi.cast("int32_t *", array.ctypes.data)
