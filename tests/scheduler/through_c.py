"""A decoder that is stepped as a loop in C steps it: by an address, with C arrays."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from decoder.batch import StepBatch
from decoder.cpu._step import ffi as cpu_ffi
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model_config import ModelConfig
from decoder.tiny import random_weights
from scheduler._loop import ffi
from scheduler.batch.callback_step import CallbackStep


class ThroughC:
    """Lays batches out with the CPU decoder's own hand, whatever computes them."""

    def __init__(self, step: Callable[[StepBatch], None], config: ModelConfig, num_pages: int = 64) -> None:
        self._layout = CpuDecoder(config, random_weights(config), Arena(config, num_pages), 1)
        self.callback = CallbackStep(step, config.vocab_size)

    def step(self, batch: StepBatch, change: Callable[[Any], None] = lambda _laid_out: None) -> None:
        """`change`: what is to be different in the C batch."""
        laid_out, keep = self._layout._lay_out(batch)
        change(laid_out)
        native = self.callback.native
        function = ffi.cast("sym_step_function *", native.function)
        address = int(cpu_ffi.cast("uintptr_t", laid_out))
        error = function(ffi.cast("sym_decoder *", native.decoder), ffi.cast("sym_batch *", address))
        del keep
        failure = native.take_failure()
        assert error == (0 if failure is None else errno.EIO)
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._layout.close()
