"""Steps that follow each other in C, beside what the scheduler does meanwhile."""

import struct
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from libsym.abi import ROWS_ALL, ROWS_LAST, ROWS_NONE, Op
from libsym.channel.server import Request
from libsym.errors import NoSpace
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import PredCall
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited
from scheduler.operations.pred import Predicting
from scheduler.wire.replies import Reply
from tests.scheduler.bench import VOCAB_SIZE, Steps
from tests.scheduler.standing_bench import Standing


class Runs(Standing):
    """Steps that compute nothing and are held, and four pages of memory."""

    is_closed = False

    def __init__(self, directory):
        super().__init__(directory, num_pages=4)
        self.steps = Steps()
        self.steps.hold()
        self.batches = BatchScheduler(self.fs, self.steps, 2048, VOCAB_SIZE, native=self.steps.native)
        config: Any = self.model.config
        limited = Limited(config)
        self.predicting = Predicting(self.batches, lambda _file: limited)

    def close(self):
        if not self.is_closed:
            super().close()
        self.is_closed = True

    async def stepped(self):
        while not self.batches.statistics.num_steps:
            await trio.lowlevel.checkpoint()


@pytest.fixture
def bench(tmp_path):
    return Runs(tmp_path)


@pytest.mark.parametrize(("num_tokens", "expected"), [(96, Reply), (97, NoSpace)])
async def test_what_a_run_has_reserved_ahead_is_there_for_others(bench, num_tokens, expected):
    """From its second call on the run has taken three pages of four, and uses one."""
    outcomes, over = [], trio.Event()

    def finished(outcome):
        outcomes.append(type(outcome))
        over.set()

    handle = bench.decode(bench.file(), 1)
    bench.steps.gate.set()
    await bench.stepped()
    await bench.held(lambda: bench.decode_on(handle, 1))
    while bench.fs.pool.num_free > 1:
        await trio.lowlevel.checkpoint()
    bench.batches.submit(PredCall(bench.program, bench.file(), np.ones(num_tokens, np.int32), None, 0, finished))
    bench.steps.gate.set()
    await over.wait()
    assert outcomes == [expected]


@pytest.fixture
def is_free(bench, no_collector):
    """Whether the memory of the program is free: at once, not when the collector comes."""
    found = threading.Event()
    weakref.finalize(bench.program.channel.memory[1], found.set)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ROWS_LAST, ROWS_ALL], ids=["in a run", "in a step"])
async def test_the_memory_of_a_program_that_goes_in_a_step_is_free_when_that_is_over(bench, is_free, flags):
    request = Request(Op.PRED, flags, 1, bench.program.add(bench.file()), (1, 0, 0, 0), struct.pack("=i", 7))
    bench.predicting.pred(SystemCall(bench.program, request))
    await bench.steps.wait_entered()
    bench.close()
    bench.steps.gate.set()
    assert await trio.to_thread.run_sync(is_free.wait, 20)


@pytest.mark.slow
async def test_an_error_that_is_kept_has_hold_of_no_run(bench, is_free):
    """The collector can not take a buffer that C has: what led to one, and was garbage, ended the daemon."""
    handle = bench.decode(bench.file(), 1)
    await bench.steps.wait_entered()
    too_many = struct.pack("=IHHIIQQ4q", 64 + 800, Op.PRED, 0, ROWS_NONE, 0, 0, handle, 200, 0, 0, 0) + bytes(832)
    bench.predicting.pred_batch(SystemCall(bench.program, Request(Op.PRED_BATCH, 0, 2, 0, (1, 0, 0, 0), too_many)))
    bench.steps.gate.set()
    while bench.batches.num_waiting:
        await trio.lowlevel.checkpoint()
    assert bench.batches.statistics.num_failed_calls == 1
    bench.close()
    assert await trio.to_thread.run_sync(is_free.wait, 20)
