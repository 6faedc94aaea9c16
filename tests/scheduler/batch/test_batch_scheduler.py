"""The batch scheduler over a real file system, a real arena and a real decoder of a tiny model."""

import errno
import math
import os
import threading
from functools import cached_property

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.names.tree import Credentials
from libsym.errors import StepFailed, SymError
from scheduler._loop import ffi
from scheduler.batch.accounting import STEP_SIZES
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.reduction import row_failure
from tests.scheduler.bench import LIMITS, ME, NUM_PAGES, VOCAB_SIZE, Bench, Program, Steps


def test_a_loop_of_steps_that_ends_leaves_no_descriptor_open(bench):
    def num_open():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - links that may be gone by now

    before = num_open()
    bench.run_test(trio.lowlevel.checkpoint)
    assert num_open() <= before


async def test_calls_that_wait_together_share_one_step(bench):
    first = await bench.held(lambda: bench.submit(bench.file(), [1, 2, 3]))
    others = [bench.submit(bench.file(), [7], program=Program(pid)) for pid in (2, 3, 4)]
    await bench.finish(first, *others)
    assert bench.steps.batches == [[(0, 3)], [(0, 1), (0, 1), (0, 1)]]
    numbers = bench.batches.statistics
    assert (numbers.max_lips_in_step, numbers.num_calls_in_steps, numbers.num_steps_in_c) == (3, 4, 0)
    by_size = zip((*STEP_SIZES, math.inf), numbers.num_steps_by_size, strict=True)
    assert {size: count for size, count in by_size if count} == {1: 1, 4: 1}


def test_steps_that_need_no_interpreter_are_counted(bench):
    bench.steps = Steps()
    bench.run_test(lambda: bench.finish(bench.submit(bench.file(), [1])))
    assert (bench.batches.statistics.num_steps, bench.batches.statistics.num_steps_in_c) == (1, 1)


async def test_the_tokens_of_calls_in_flight_are_rows_that_wait(bench):
    files = [bench.fs.kv_create(ME, None) for _ in range(2)]
    first = await bench.held(lambda: bench.submit(files[0], [5] * 40))
    second = bench.submit(files[1], [6, 7])
    assert bench.batches.num_rows_waiting == 42
    await bench.finish(first, second)
    assert bench.batches.num_rows_waiting == 0


async def test_a_call_that_is_computed_has_changed_and_used_its_file(bench):
    file = bench.fs.kv_create(ME, "a.kv", 0o600)
    inode, content = file.inode, file.content
    inode.mtime_ns = changes = content.changes = 0
    bench.fs.volume.heat.forget(inode)
    await bench.submit(file, [1, 2]).wait()
    assert inode.mtime_ns > 0
    assert content.changes > changes
    assert bench.fs.volume.heat.hottest(ME.uid) == [inode]


async def test_calls_and_actions_on_one_file_run_in_the_order_of_their_arrival(bench):
    file = bench.file()
    await bench.submit(file, [1, 2]).wait()
    before = await bench.held(lambda: bench.submit(file, [9] * 40))
    bench.batches.exclusive(file, lambda: bench.fs.kv_truncate(file, 2))
    after = [bench.submit(file, [token], program=Program(token)) for token in range(3, 9)]
    fork = bench.fs.kv_fork(ME, file, None)
    assert file.table.length == 2
    await bench.finish(before, *after)
    assert file.table.read()[0].tolist() == list(range(1, 9))
    assert file.table.read()[1].tolist() == list(range(8))
    (row,) = await bench.submit(fork, [3]).wait()
    assert fork.table.read()[0].tolist() == [1, 2, 3], "a fork has the committed entries only"
    assert (row == (await bench.submit(bench.file(), [1, 2, 3]).wait())[0]).all()


def test_a_decoder_is_told_of_the_pages_of_a_call_before_its_step_begins(bench):
    """The pages may be far from the device."""
    told, native = [], bench.steps.native
    bench.batches = BatchScheduler(
        bench.fs, bench.steps, 2048, VOCAB_SIZE, native=native, expect=lambda frames: told.append(frames.tolist())
    )

    async def scenario():
        first = await bench.held(lambda: bench.submit(bench.file(), [9]))
        second = bench.submit(bench.file(), [1] * 70)
        assert told[1:] == [second.call.reservation.frames().tolist()]
        await bench.finish(first, second)

    bench.run_test(scenario)


async def test_a_program_that_goes_away_takes_its_calls_with_it(bench):
    gone, stays = Program(1), Program(2)
    free = bench.fs.statfs().num_free_pages
    running, other = bench.file(), bench.file()
    in_step = await bench.held(lambda: bench.submit(running, [1] * 40, program=gone))
    queued = bench.submit(running, [2], program=gone)
    ready = bench.submit(bench.file(), [3] * 40, program=gone)
    survivor = bench.submit(other, [4], program=stays)
    bench.batches.drop(gone)
    closed = []
    bench.batches.exclusive(running, lambda: closed.append(bench.fs.kv_close(running)))
    assert not closed, "its pages belong to the running step"
    await bench.finish(survivor)
    assert closed
    assert not any(result.is_over for result in (in_step, queued, ready))
    bench.fs.kv_close(other)
    assert bench.fs.statfs().num_free_pages == free


async def test_a_defect_in_one_job_does_not_keep_the_file_from_the_next(bench, monkeypatch, caplog):
    def defect():
        raise ZeroDivisionError

    file = bench.file()
    reserve = bench.fs.reserve
    monkeypatch.setattr(bench.fs, "reserve", lambda *_: defect())
    with pytest.raises(SymError, match="ZeroDivisionError"):
        await bench.submit(file, [1]).wait()
    monkeypatch.setattr(bench.fs, "reserve", reserve)
    bench.batches.exclusive(file, defect)
    await bench.submit(file, [2]).wait()
    assert file.table.read()[0].tolist() == [2]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


async def test_a_launch_waits_for_every_thread_that_is_about_to_return(bench):
    program = Program()

    def submit(stream, file, token):
        program.stream = stream
        return bench.submit(file, [token], program=program)

    bench.batches._run.set_cost(ffi.new("sym_cost *", {"rows_ns": [10**10] * 11}))  # longer than this test may take
    files = [bench.file() for _ in range(3)]
    for token in (1, 2):  # a stream is expected once it has come back
        for result in [submit(stream, file, token) for stream, file in enumerate(files, 1)]:
            await result.wait()
    num_steps = len(bench.steps.batches)
    again = []
    for stream, file in enumerate(files, 1):
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.steps.batches) == num_steps
        again.append(submit(stream, file, 3))
    for result in again:
        await result.wait()
    assert bench.steps.batches[num_steps:] == [[(2, 1), (2, 1), (2, 1)]]


async def test_a_step_zeroes_pages_of_others_before_it_computes_and_the_owners_thread_none(bench):
    """A zeroed page takes the trio thread 0.1 ms: a long prefill would hold up everybody."""
    ann = Credentials(1001, 1001)
    arena, marker = bench.fs.pool.store.store, np.float32(77.5)
    zeroed_by = []
    zero = arena.zero

    def noting_zero(page):
        zeroed_by.append(threading.current_thread())
        zero(page)

    arena.zero = noting_zero  # the real thing, and who calls it
    before = bench.file()
    await bench.submit(before, [1] * (NUM_PAGES - 1) * 32, rows="none").wait()
    arena.pages[before.table.pages] = marker
    bench.fs.kv_close(before)
    file = bench.fs.kv_create(ann, None)
    await bench.submit(file, [2] * 100, rows="none").wait()
    assert len(zeroed_by) == 4
    assert not (arena.pages[file.table.pages] == marker).any()
    assert threading.current_thread() not in zeroed_by
    bench.steps.failure = RuntimeError("planted")
    with pytest.raises(StepFailed):
        await bench.submit(file, [3] * 100, rows="none").wait()
    await bench.submit(file, [3] * 100, rows="none").wait()
    assert not (arena.pages[file.table.pages] == marker).any()


# ---- before the decoder has its weights


class EarlyBench(Bench):
    """A bench whose scheduler runs before there is a decoder."""

    @cached_property
    def batches(self):
        return BatchScheduler(self.fs, None, 2048, VOCAB_SIZE, LIMITS)


@pytest.fixture
def early(tmp_path):
    return EarlyBench(tmp_path)


async def test_calls_wait_for_the_decoder_in_the_order_of_their_arrival(early):
    file = early.file()
    results = [early.submit(file, [token], program=Program(token)) for token in (1, 2, 3)]
    await trio.testing.wait_all_tasks_blocked()
    assert not any(result.is_over for result in results)
    assert early.batches.num_waiting == 3
    assert early.fs.kv_fork(ME, file, None).table.length == 0
    assert not early.batches.has_decoder
    early.batches.provide(early.steps)
    (row,) = await results[-1].wait()
    assert early.batches.has_decoder
    assert file.table.read()[0].tolist() == [1, 2, 3]
    assert (row == (await early.submit(early.file(), [1, 2, 3]).wait())[0]).all()


async def test_a_call_that_is_cancelled_or_whose_program_goes_while_it_waits_for_the_decoder_costs_nothing(early):
    file, gone = early.file(), Program()
    free = early.fs.statfs().num_free_pages
    cancelled, dropped = early.submit(file, [1, 2]), early.submit(file, list(range(100)), program=gone)
    await trio.testing.wait_all_tasks_blocked()
    early.batches.cancel(cancelled.call)
    assert (cancelled.error.errno, file.table.length) == (errno.ECANCELED, 0)
    early.batches.drop(gone)
    assert early.fs.statfs().num_free_pages == free
    early.batches.provide(early.steps)
    await early.submit(file, [7]).wait()
    assert file.table.read()[0].tolist() == [7]
    assert not dropped.is_over


def test_memory_that_lacks_for_a_draw_is_an_error_of_that_generation_alone():
    """Not one of the scheduler, which would end with it."""
    failure = row_failure(errno.ENOMEM)
    assert (type(failure), failure.errno) == (SymError, errno.ENOMEM)
