"""The batch scheduler over a real file system, a real arena and a real decoder of a tiny model."""

import math
import os
import threading

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.names.tree import Credentials
from libsym.errors import Invalid, NoSpace, StepFailed, SymError
from scheduler._loop import ffi
from scheduler.batch.accounting import STEP_SIZES
from scheduler.batch.batch_scheduler import BatchScheduler
from tests.scheduler.bench import ME, NUM_PAGES, Program, Steps


def test_a_loop_of_steps_that_ends_leaves_no_descriptor_open(bench):
    def num_open():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - links that may be gone by now

    before = num_open()
    bench.run(trio.lowlevel.checkpoint)
    assert num_open() <= before


async def test_calls_that_wait_together_share_one_step(bench):
    bench.steps.hold()
    first = bench.submit(bench.file(), [1, 2, 3])
    await bench.steps.wait_entered()
    others = [bench.submit(bench.file(), [7], program=Program(pid)) for pid in (2, 3, 4)]
    bench.steps.gate.set()
    for result in (first, *others):
        await result.wait()
    assert bench.steps.batches == [[(0, 3)], [(0, 1), (0, 1), (0, 1)]]
    assert bench.batches.statistics.max_lips_in_step == 3


async def test_a_call_has_the_same_bits_alone_in_a_batch_and_in_chunks(bench):
    prompt = list(range(5, 105))
    alone = (await bench.submit(bench.file(), prompt).wait())[0]  # in chunks of 64 and 36
    bench.steps.hold()
    held = bench.submit(bench.file(), [9])
    await bench.steps.wait_entered()
    crowd = [bench.submit(bench.file(), [token]) for token in range(30)]
    again = bench.submit(bench.file(), prompt)  # in chunks of 16 at first
    bench.steps.gate.set()
    assert ((await again.wait())[0] == alone).all()
    for result in (held, *crowd):
        await result.wait()
    file = bench.file()
    for token in prompt:
        (row,) = await bench.submit(file, [token]).wait()
    assert (row == alone).all()


async def test_all_rows_of_a_chunked_prefill_equal_the_rows_of_single_steps(bench):
    prompt = list(range(1, 71))
    rows = await bench.submit(bench.file(), prompt, rows="all").wait()
    assert len(rows) == 70
    file = bench.file()
    for token, row in zip(prompt, rows, strict=True):
        (single,) = await bench.submit(file, [token]).wait()
        assert (single == row).all()


async def test_calls_on_one_file_run_in_the_order_of_their_arrival(bench):
    file = bench.file()
    results = [bench.submit(file, [token], program=Program(token)) for token in range(1, 9)]
    for result in results:
        await result.wait()
    tokens, positions = file.table.read()
    assert tokens.tolist() == list(range(1, 9))
    assert positions.tolist() == list(range(8))


async def test_a_failed_step_gives_everything_back_and_the_next_one_works(bench):
    file = bench.file()
    await bench.submit(file, [1, 2]).wait()
    free = bench.fs.statfs().num_free_pages
    bench.steps.failure = RuntimeError("out of luck")
    with pytest.raises(StepFailed, match="out of luck"):
        await bench.submit(file, list(range(50))).wait()
    assert file.table.length == 2
    assert bench.fs.statfs().num_free_pages == free
    await bench.submit(file, [3]).wait()
    assert file.table.read()[0].tolist() == [1, 2, 3]


async def test_a_full_pool_refuses_the_call_at_once_and_loses_nothing(bench):
    file = bench.file()
    await bench.submit(file, [1] * (NUM_PAGES - 1) * 32, rows="none").wait()
    other = bench.file()
    with pytest.raises(NoSpace):
        await bench.submit(other, [2] * 33).wait()
    await bench.submit(other, [2] * 32).wait()
    with pytest.raises(NoSpace):
        await bench.submit(file, [3]).wait()
    assert file.table.length == (NUM_PAGES - 1) * 32
    bench.fs.kv_close(file)
    await bench.submit(other, [4]).wait()


async def test_a_program_that_goes_away_takes_its_calls_with_it(bench):
    gone, stays = Program(1), Program(2)
    free = bench.fs.statfs().num_free_pages
    bench.steps.hold()
    running, other = bench.file(), bench.file()
    in_step = bench.submit(running, [1] * 40, program=gone)
    await bench.steps.wait_entered()
    queued = bench.submit(running, [2], program=gone)
    ready = bench.submit(bench.file(), [3] * 40, program=gone)
    survivor = bench.submit(other, [4], program=stays)
    bench.batches.drop(gone)
    closed = []
    bench.batches.exclusive(running, lambda: closed.append(bench.fs.kv_close(running)))
    assert not closed, "its pages belong to the running step"
    bench.steps.gate.set()
    await survivor.wait()
    assert closed
    assert not any(result.is_over for result in (in_step, queued, ready))
    bench.fs.kv_close(other)
    assert bench.fs.statfs().num_free_pages == free


async def test_actions_wait_for_the_calls_before_them(bench):
    file = bench.file()
    bench.steps.hold()
    before = bench.submit(file, [1, 2, 3])
    await bench.steps.wait_entered()
    bench.batches.exclusive(file, lambda: bench.fs.kv_truncate(file, 1))
    after = bench.submit(file, [9])
    assert file.table.length == 0
    bench.steps.gate.set()
    await before.wait()
    await after.wait()
    assert file.table.read()[0].tolist() == [1, 9]


async def test_a_fork_taken_during_a_step_has_the_committed_entries_only(bench):
    file = bench.file()
    await bench.submit(file, [1, 2]).wait()
    bench.steps.hold()
    running = bench.submit(file, [3] * 40)
    await bench.steps.wait_entered()
    fork = bench.fs.kv_fork(ME, file, None)
    bench.steps.gate.set()
    await running.wait()
    (row,) = await bench.submit(fork, [3]).wait()
    assert fork.table.read()[0].tolist() == [1, 2, 3]
    (alone,) = await bench.submit(bench.file(), [1, 2, 3]).wait()
    assert (row == alone).all()


async def test_positions_continue_after_the_last_entry_and_may_be_given(bench):
    file = bench.file()
    await bench.submit(file, [1, 2], positions=[10, 20]).wait()
    await bench.submit(file, [3]).wait()
    assert file.table.read()[1].tolist() == [10, 20, 21]
    last = bench.model.config.max_positions - 1
    await bench.submit(file, [4], positions=[last]).wait()
    with pytest.raises(Invalid, match="context"):
        await bench.submit(file, [5]).wait()
    assert file.table.length == 4


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


def test_a_decoder_is_told_of_the_pages_of_a_call_before_its_step_begins(bench):
    """The pages may be far from the device."""
    config, told = bench.model.config, []
    bench.batches = BatchScheduler(
        bench.fs,
        bench.steps,
        config.max_positions,
        config.vocab_size,
        native=bench.steps.native,
        expect=lambda frames: told.append(frames.tolist()),
    )

    async def scenario():
        bench.steps.hold()
        first = bench.submit(bench.file(), [9])
        await bench.steps.wait_entered()
        second = bench.submit(bench.file(), [1] * 70)
        reservation = second.call.reservation
        assert told[1:] == [reservation.frames().tolist()]
        bench.steps.gate.set()
        await first.wait()
        await second.wait()

    bench.run(scenario)


async def test_what_a_program_has_used_is_counted(bench):
    one, other = Program(1), Program(2)
    await bench.submit(bench.file(), [1, 2, 3], program=one).wait()
    await bench.submit(bench.file(), [4], program=one).wait()
    with pytest.raises(NoSpace):
        await bench.submit(bench.file(), [1] * (NUM_PAGES * 32 + 1), program=one).wait()
    await bench.submit(bench.file(), [5], program=other).wait()
    used = one.used
    assert (used.calls, used.failed_calls, used.tokens) == (3, 1, 4)
    assert used.compute_s > 0
    assert used.queue_s >= 0
    assert other.used.tokens == 1
    bench.batches.drop(one)
    assert one.used.calls == 3, "the program may have other connections"


async def test_steps_are_counted_by_how_many_calls_they_hold(bench):
    bench.steps.hold()
    first = bench.submit(bench.file(), [1])
    await bench.steps.wait_entered()
    others = [bench.submit(bench.file(), [7]) for _ in range(3)]
    bench.steps.gate.set()
    for result in (first, *others):
        await result.wait()
    by_size = zip((*STEP_SIZES, math.inf), bench.batches.statistics.num_steps_by_size, strict=True)
    assert [(size, count) for size, count in by_size if count] == [(1, 1), (4, 1)]
    assert bench.batches.statistics.num_calls_in_steps == 4


@pytest.mark.parametrize("is_native", [False, True])
def test_steps_that_need_no_interpreter_are_counted(bench, is_native):
    if is_native:
        bench.steps = Steps()

    async def scenario():
        await bench.submit(bench.file(), [1]).wait()
        numbers = bench.batches.statistics
        assert (numbers.num_steps, numbers.num_steps_in_c) == (1, is_native)

    bench.run(scenario)
