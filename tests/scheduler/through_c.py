"""A decoder that is stepped as a loop in C steps it: by an address, with C arrays."""

import errno
from collections.abc import Callable
from typing import Any

import numpy as np

from decoder.batch import StepBatch
from decoder.cpu._step import ffi as cpu_ffi
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model_config import ModelConfig
from decoder.tiny import random_weights
from scheduler._loop import ffi
from scheduler.batch.callback_step import CallbackStep
from tests.decoder.bench import Bench, Call, tokens_of


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


def mixed_calls(bench: Bench) -> list[Call]:
    """Prefills, decodes, a mask over old entries and one of each row's own, all rows, last rows and none."""
    files = [bench.prefill(tokens_of(length, length), reserve=8)[0] for length in (40, 5, 33, 64)]
    over_old = np.tri(6, 6 + 40, 40, dtype=np.bool_)
    over_old[:, 3:37] = False
    own = np.random.default_rng(2).random((2, 2 + 33)) < 0.5
    own[np.arange(2), 33 + np.arange(2)] = True
    silent, fresh = bench.file(3), bench.file(40)
    return [
        Call(files[0], tokens_of(6), mask=over_old, mass=bench.no_mass(46)),
        Call(silent, [1, 2, 3], "none"),
        Call(files[1], [9], positions=[77]),
        Call(files[2], [8, 9], "last", mask=own),
        Call(fresh, tokens_of(37), "last"),
        Call(files[3], [4], mass=bench.no_mass(70)),
    ]
