"""Calls that wait for pages: with memory for a tenth of the files every row has the same bits as with enough of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from kvfs.fs import OpenKv
from libsym.abi import PAGE_ENTRIES, Op
from libsym.channel.server import Request
from libsym.errors import NoSpace
from scheduler.batch import making_room
from scheduler.batch.states import CallState
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from tests.scheduler.bench import ME, Answers, Bench, Program, Result, new_generation
from tests.scheduler.kept_bench import KeptBench

PAGE = PAGE_ENTRIES
NUM_FRAMES = 16


@pytest.fixture
def bench(tmp_path: Path) -> KeptBench:
    return KeptBench(tmp_path, num_pages=NUM_FRAMES)


def prompt(number: int, count: int = 3 * PAGE + 5) -> list[int]:
    return [(number * 7 + each * 3) % 250 for each in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a condition that sends no event."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


async def computed(bench: KeptBench, number: int, count: int = 3 * PAGE + 5) -> OpenKv:
    """A file that was, and may be on disk by now."""
    file = bench.file()
    await bench.submit(file, prompt(number, count)).wait()
    return file


async def on_disk(bench: KeptBench, number: int, count: int = 3 * PAGE + 5) -> OpenKv:
    file = await computed(bench, number, count)
    await bench.pager.put_on_disk(file.table)
    return file


async def holding_memory(bench: KeptBench, count: int = 14 * PAGE, *, priority: int = 0) -> Result:
    """A call that is being computed, and has most of memory; its step is held."""
    return await bench.held(lambda: bench.submit(bench.file(), prompt(99, count), priority=priority))


def waits(bench: KeptBench, *results: Result) -> bool:
    calls: list[Any] = [result.call for result in results]
    return all(bench.batches._calls.state_of(call) is CallState.WAITS_FOR_PAGES for call in calls)


async def loops(bench: Bench, num_files: int, num_tokens: int) -> dict[int, list[np.ndarray]]:
    """Run programs at once, each a loop over pred() with a fork in the middle; return every row of each."""
    rows: dict[int, list[np.ndarray]] = {}

    async def loop(number: int) -> None:
        program, file = Program(number + 1), bench.file()
        found = rows[number] = []
        tokens: Sequence[int] = prompt(number)
        for step in range(num_tokens):
            (row,) = await bench.submit(file, tokens, program=program).wait()
            found.append(row.copy())
            tokens = [int(np.argmax(row))]
            if step == num_tokens // 2:
                fork = bench.fs.kv_fork(ME, file, None)
                every = await bench.submit(fork, prompt(number + 1, 5), program=program, rows="all").wait()
                found += [each.copy() for each in every]
                bench.fs.kv_close(fork)
                bench.fs.kv_truncate(file, file.table.length - 3)
            await trio.sleep(0.002)  # it thinks

    async with trio.open_nursery() as nursery:
        for number in range(num_files):
            nursery.start_soon(loop, number)
    return rows


@pytest.mark.slow
def test_loops_over_ten_times_the_memory_have_the_same_bits_as_with_enough(tmp_path, bench):
    found: list[dict[int, list[np.ndarray]]] = []

    async def scenario(of: Bench) -> None:
        found.append(await loops(of, 20, 4))

    enough = Bench(tmp_path / "enough", num_pages=400)
    enough.run_test(lambda: scenario(enough))
    bench.run_test(lambda: scenario(bench))
    assert bench.pager.statistics().num_in > 30
    for number, rows in found[0].items():
        assert len(rows) == 9
        assert all(np.array_equal(row, other) for row, other in zip(rows, found[1][number], strict=True))


async def test_what_can_never_be_in_memory_at_once_is_told_so_and_others_go_on(bench):
    first = await holding_memory(bench)
    large, small = bench.submit(bench.file(), prompt(1, 17 * PAGE)), bench.submit(bench.file(), prompt(2))
    with pytest.raises(NoSpace, match="17 pages are needed in memory at once, and there is room for 16"):
        await large.wait()
    assert large.call.file.table.length == 0
    await bench.finish(first, small)


def generated(answers: Answers, number: int) -> list[int]:
    """The tokens that a program has got."""
    payloads = b"".join(payload for _, payload, _ in answers.replies[number])
    return [*memoryview(payloads).cast("i")]


async def both(bench: Bench) -> tuple[list[int], list[int], bool]:
    """Run a long generation of low priority and a shorter one of high. Return the tokens of both, and whether the low
    one ended first.
    """
    lip = bench.lip()
    answers: Answers = lip.channel
    low, high = bench.file(), bench.file()  # on a busy machine one would be over before the other begins
    await bench.held(lambda: begin(bench, lip, low, prompt(1, 7 * PAGE), 1, max_tokens=64, priority=-10))
    begin(bench, lip, high, prompt(2, 9 * PAGE), 2, max_tokens=32, priority=10)
    bench.steps.gate.set()
    await until(lambda: len(answers.over) == 2)
    assert set(answers.errors.values()) == {0}
    return generated(answers, 1), generated(answers, 2), [*answers.over] == [1, 2]


def begin(
    bench: Bench, lip: Lip, file: OpenKv, tokens: Sequence[int], number: int, *, max_tokens: int, priority: int
) -> None:
    request = Request(Op.GENERATE, 0, number, lip.add(file), (len(tokens), 0, max_tokens, priority), b"")
    call = SystemCall(lip, request)
    bench.batches.submit(new_generation(lip, file, tokens, call, max_tokens=max_tokens, priority=priority))


async def test_nobody_is_refused_for_room_that_he_would_only_use_later(bench):
    """A fork whose pages fill memory, with the tail that it copies: entries reserved ahead have no room beside them."""
    source = await on_disk(bench, 1, 14 * PAGE + 5)
    lip = bench.lip()
    answers: Answers = lip.channel
    begin(bench, lip, bench.fs.kv_fork(ME, source, None), [1], 1, max_tokens=8, priority=0)
    await until(lambda: 1 in answers.over)
    assert answers.errors == {1: 0}
    assert len(generated(answers, 1)) == 8


def test_a_low_priority_leaves_memory_for_a_high_one_and_comes_back_by_itself(tmp_path, bench):
    found: list[tuple[list[int], list[int], bool]] = []

    async def scenario(of: Bench) -> None:
        found.append(await both(of))

    enough = Bench(tmp_path / "enough", num_pages=400)
    enough.run_test(lambda: scenario(enough))
    bench.run_test(lambda: scenario(bench))
    assert found[0][:2] == found[1][:2]
    assert not found[1][2], "the low one went on, and the high one waited"
    assert bench.pager.statistics().num_preempted == 1


async def test_no_more_calls_make_room_than_a_higher_priority_needs(bench):
    low = [await holding_memory(bench, 6 * PAGE, priority=-10)]
    low.append(bench.submit(bench.file(), prompt(1, 6 * PAGE), priority=-10))
    high = bench.submit(bench.file(), prompt(2, 8 * PAGE), priority=10)
    assert waits(bench, high)
    assert bench.pager.statistics().num_preempted == 1
    await bench.finish(*low, high)


async def test_equal_ones_wait_their_turn_until_one_has_had_its_time(bench, monkeypatch):
    """The decode steps of a file that holds most of memory end for a while when its time is over."""
    monkeypatch.setattr(making_room, "QUANTUM_S", 0.05)
    first = await computed(bench, 1, 10 * PAGE)
    second = await on_disk(bench, 2, 8 * PAGE)
    num_done = [0, 0]

    async def go_on(place: int, file: OpenKv) -> None:
        while min(num_done) < 5:
            await bench.submit(file, [1], program=Program(place + 1)).wait()
            num_done[place] += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on, 0, first)
        nursery.start_soon(go_on, 1, second)
    assert first.table.length == 10 * PAGE + num_done[0]
    assert second.table.length == 8 * PAGE + num_done[1]
    assert bench.pager.statistics().num_dropped >= 8, "they can't both be in memory"
