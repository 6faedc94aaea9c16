"""Steps that follow each other in C, beside what the scheduler does meanwhile."""

import errno
import os
import struct
import threading
import weakref

import numpy as np
import pytest
import trio
import trio.testing

from libsym.abi import ROWS_ALL, ROWS_LAST, ROWS_NONE, Op
from libsym.channel.server import Request, ServerChannel
from libsym.errors import NoSpace, SymError
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import PredCall
from scheduler.batch.ends import row_failure
from scheduler.batch.policy import StepLimits
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited
from scheduler.operations.pred import Predicting
from scheduler.wire.replies import Reply
from tests.scheduler.bench import ME, Bench, Steps


class Runs(Bench):
    """A program, and steps that compute nothing and are held."""

    def __init__(self, directory):
        super().__init__(directory, num_pages=4, limits=StepLimits())
        self.steps = Steps()
        self.steps.hold()
        self.predicting = Predicting(self.batches, Limited(self.model.config))
        self.program = Lip(os.getpid(), ME, ServerChannel.create(self.model.config.vocab_size))

    def decode(self, file):
        """A call that a run goes on from."""
        self.decode_on(self.program.add(file))

    def decode_on(self, handle):
        Predicting(self.batches, Limited(self.model.config)).pred(SystemCall(self.program, decode(1, handle)))

    def write(self, file, num_tokens, answer):
        self.batches.submit(PredCall(self.program, file, np.ones(num_tokens, np.int32), None, 0, answer))

    def run(self, scenario):
        super().run(scenario)
        self.batches.drop(self.program)
        self.program.channel.close()
        self.fs.check()


def decode(number, handle, flags=ROWS_LAST):
    return Request(Op.PRED, flags, number, handle, (1, 0, 0, 0), struct.pack("=i", 7))


@pytest.fixture
def bench(tmp_path):
    return Runs(tmp_path)


def test_calls_that_waited_for_the_decoder_go_on_in_a_run(tmp_path):
    bench = Runs(tmp_path)
    config = bench.model.config
    bench.batches = BatchScheduler(bench.fs, None, config.max_positions, config.vocab_size)

    async def scenario():
        bench.decode(bench.fs.kv_create(ME, None))
        await trio.testing.wait_all_tasks_blocked()
        assert bench.fs.pool.num_free == 3, "the file of a branch is closed after one call"
        bench.batches.provide(bench.steps, bench.steps.native)
        await bench.steps.wait_entered()
        bench.steps.gate.set()
        while not bench.batches.statistics.num_steps:
            await trio.lowlevel.checkpoint()
        assert bench.batches.statistics.num_steps == 1

    bench.run(scenario)


@pytest.mark.parametrize(("num_tokens", "expected"), [(96, Reply), (97, NoSpace)])
def test_what_a_run_has_reserved_ahead_is_there_for_others(bench, num_tokens, expected):
    """From its second call on the run has taken three pages of four, and uses one."""
    outcomes, over = [], trio.Event()

    def finished(outcome):
        outcomes.append(type(outcome))
        over.set()

    async def scenario():
        handle = bench.program.add(bench.fs.kv_create(ME, None))
        bench.decode_on(handle)
        bench.steps.gate.set()
        while not bench.batches.statistics.num_steps:
            await trio.lowlevel.checkpoint()
        bench.steps.hold()
        bench.decode_on(handle)
        await bench.steps.wait_entered()
        while bench.fs.pool.num_free > 1:
            await trio.lowlevel.checkpoint()
        bench.write(bench.fs.kv_create(ME, None), num_tokens, finished)
        bench.steps.gate.set()
        await over.wait()

    bench.run(scenario)
    assert outcomes == [expected]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("flags", [ROWS_LAST, ROWS_ALL], ids=["in a run", "in a step"])
async def test_the_memory_of_a_program_that_goes_in_a_step_is_free_when_that_is_over(bench, flags):
    """The memory is free at once, not when the collector comes."""
    is_free = threading.Event()
    weakref.finalize(bench.program.channel.memory[1], is_free.set)
    handle = bench.program.add(bench.fs.kv_create(ME, None))
    bench.predicting.pred(SystemCall(bench.program, decode(1, handle, flags)))
    await bench.steps.wait_entered()
    bench.batches.drop(bench.program)
    bench.program.channel.close()
    bench.steps.gate.set()
    assert await trio.to_thread.run_sync(is_free.wait, 20)


@pytest.mark.usefixtures("no_collector")
async def test_an_error_that_is_kept_has_hold_of_no_run(bench):
    """The collector can not take a buffer that C has: what led to one, and was garbage, ended the daemon."""
    is_free = threading.Event()
    weakref.finalize(bench.program.channel.memory[1], is_free.set)
    handle = bench.program.add(bench.fs.kv_create(ME, None))
    bench.predicting.pred(SystemCall(bench.program, decode(1, handle)))
    await bench.steps.wait_entered()
    too_many = struct.pack("=IHHIIQQ4q", 64 + 800, Op.PRED, 0, ROWS_NONE, 0, 0, handle, 200, 0, 0, 0) + bytes(832)
    batch = Request(Op.PRED_BATCH, 0, 2, 0, (1, 0, 0, 0), too_many)
    bench.predicting.pred_batch(SystemCall(bench.program, batch))
    bench.steps.gate.set()
    while bench.batches.num_waiting:
        await trio.lowlevel.checkpoint()
    assert bench.batches.statistics.num_failed_calls == 1
    bench.program.channel.close()
    assert await trio.to_thread.run_sync(is_free.wait, 20)


def test_memory_that_lacks_for_a_draw_is_an_error_of_that_generation_alone():
    """Not one of the scheduler, which would end with it."""
    failure = row_failure(errno.ENOMEM)
    assert (type(failure), failure.errno) == (SymError, errno.ENOMEM)
