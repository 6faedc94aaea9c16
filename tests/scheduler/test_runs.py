"""Steps that follow each other in C, beside what the scheduler does meanwhile."""

import ctypes
import errno
import gc
import os
import struct
import threading
import weakref

import numpy as np
import pytest
import trio

from decoder.batch import NativeStep
from decoder.cpu.arena import Arena
from decoder.image_facts import Facts
from decoder.model import load_model
from kvfs.fs import FileSystem
from kvfs.names.tree import Credentials
from kvfs.pages.pool import PagePool
from libsym.abi import ROWS_ALL, ROWS_LAST, ROWS_NONE, Op
from libsym.channel.server import Request, ServerChannel
from libsym.errors import NoSpace, SymError
from scheduler._loop import ffi
from scheduler.batch.batch_scheduler import BatchScheduler, PredCall
from scheduler.batch.run import Member
from scheduler.batch.step_thread import StepThread
from scheduler.connection.lip import Lip
from scheduler.operations.decode_call import decode_call
from scheduler.operations.pred import Limited, Predicting

NUM_PAGES = 4
ME = Credentials(0, 0, frozenset())


class Steps:
    """Steps that compute nothing, and can be held."""

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._native_step)

    def step(self, _batch):
        self.entered.release()
        assert self.gate.wait(20)

    def _native_step(self, _decoder, batch):
        self.step(batch)
        return 0


class Bench:
    def __init__(self, directory):
        model = load_model("tiny")
        arena = Arena(model.config, NUM_PAGES)
        self.fs = FileSystem(PagePool(arena), Facts(model, arena, "float32"), directory / "files", 0, 0)
        self.steps = Steps()
        native = NativeStep(ctypes.cast(self.steps.function, ctypes.c_void_p).value, 0)
        vocab_size = model.config.vocab_size
        self.batches = BatchScheduler(self.fs, self.steps, model.config.max_positions, vocab_size, native=native)
        self.predicting = Predicting(self.batches, Limited(model.config))
        self.lip = Lip(os.getpid(), ME, ServerChannel.create(vocab_size))

    def decode(self, file):
        """A call that a run goes on from."""
        handle, slot = self.lip.add(file), self.lip.channel.take_rows(1)
        tokens = np.array([7], np.int32)
        self.batches.submit(decode_call(self.lip, file, handle, 1, slot, tokens, None, lambda: None))

    def write(self, file, num_tokens, finished):
        self.batches.submit(PredCall(self.lip, file, np.ones(num_tokens, np.int32), None, (), finished))

    async def wait_entered(self):
        """Wait until a step has begun."""
        await trio.to_thread.run_sync(self.steps.entered.acquire)

    def run(self, scenario):
        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.batches.run)
                with trio.fail_after(30):
                    await scenario()
                nursery.cancel_scope.cancel()
            self.batches.drop(self.lip)
            self.lip.channel.close()
            self.fs.check()

        trio.run(main)


def decode(number, handle, flags=ROWS_LAST):
    return Request(Op.PRED, flags, number, handle, (1, 0, 0, 0), struct.pack("=i", 7))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.mark.parametrize(("num_tokens", "expected"), [(96, type(None)), (97, NoSpace)])
def test_what_a_run_has_reserved_ahead_is_there_for_others(bench, num_tokens, expected):
    """It has taken three pages of four, and uses one."""
    outcomes, over = [], trio.Event()

    def finished(error):
        outcomes.append(type(error))
        over.set()

    async def scenario():
        bench.decode(bench.fs.kv_create(ME, None))
        await bench.wait_entered()
        assert bench.fs.pool.num_free == 1
        bench.write(bench.fs.kv_create(ME, None), num_tokens, finished)
        bench.steps.gate.set()
        await over.wait()

    bench.run(scenario)
    assert outcomes == [expected]


@pytest.mark.parametrize("flags", [ROWS_LAST, ROWS_ALL], ids=["in a run", "in a step"])
def test_the_memory_of_a_program_that_goes_in_a_step_is_free_when_that_is_over(bench, flags):
    """At once, and not when the collector comes."""
    is_free = threading.Event()
    weakref.finalize(bench.lip.channel.memory[1], is_free.set)

    async def scenario():
        handle = bench.lip.add(bench.fs.kv_create(ME, None))
        bench.predicting.pred(bench.lip, decode(1, handle, flags))
        await bench.wait_entered()
        bench.batches.drop(bench.lip)
        bench.lip.channel.close()
        bench.steps.gate.set()
        assert await trio.to_thread.run_sync(is_free.wait, 20)

    gc.disable()
    try:
        bench.run(scenario)
    finally:
        gc.enable()


def test_an_error_that_is_kept_has_hold_of_no_run(bench):
    """The collector can not take a buffer that C has: what led to one, and was garbage, ended the daemon."""
    is_free = threading.Event()
    weakref.finalize(bench.lip.channel.memory[1], is_free.set)

    async def scenario():
        handle = bench.lip.add(bench.fs.kv_create(ME, None))
        bench.predicting.pred(bench.lip, decode(1, handle))
        await bench.wait_entered()
        too_many = struct.pack("=IHHIIQQ4q", 64 + 800, Op.PRED, 0, ROWS_NONE, 0, 0, handle, 200, 0, 0, 0) + bytes(832)
        bench.predicting.pred_batch(bench.lip, Request(Op.PRED_BATCH, 0, 2, 0, (1, 0, 0, 0), too_many))
        bench.steps.gate.set()
        while bench.batches.num_waiting:
            await trio.lowlevel.checkpoint()
        assert bench.batches.statistics.num_failed_calls == 1
        bench.lip.channel.close()
        assert await trio.to_thread.run_sync(is_free.wait, 20)

    gc.disable()
    try:
        bench.run(scenario)
    finally:
        gc.enable()


def test_a_step_that_is_over_keeps_the_memory_of_no_program():
    class Step:
        def __call__(self):
            pass

    is_gone = threading.Event()

    async def main():
        thread, step = StepThread(), Step()
        weakref.finalize(step, is_gone.set)
        await thread.run(step)
        del step
        assert await trio.to_thread.run_sync(is_gone.wait, 20)
        thread.close()

    trio.run(main)


def test_memory_that_lacks_for_a_draw_is_an_error_of_that_generation_alone():
    """Not one of the scheduler, which would end with it."""
    member = Member(0, None, ffi.new("sym_member *", {"draw_error": errno.ENOMEM}))
    failure = member.draw_failure()
    assert (type(failure), failure.errno) == (SymError, errno.ENOMEM)
