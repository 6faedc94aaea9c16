"""Calls that have to begin their last step in time: the fate of late calls, in every state."""

import errno
import threading
import time
from typing import Any

import pytest
import trio
import trio.testing

from libsym.abi import Finish
from libsym.errors import TimedOut
from scheduler.batch.deadlines import Deadlines
from scheduler.batch.grammar import Grammars
from scheduler.batch.policy import StepLimits
from tests.scheduler.appended import GREEDY, Requests, generate, int32, options, pred

SOON_S = 0.05
LATER_S = 1000.0


class Late:
    """A call that does nothing."""

    def __init__(self, deadline_s):
        self.deadline_s = deadline_s


def test_calls_are_ended_in_the_order_of_their_deadlines_unless_they_are_over():
    async def main():
        missed = list[Any]()
        deadlines: Any = Deadlines(missed.append, clock=trio.current_time)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deadlines.run)
            calls = [Late(trio.current_time() + delay_s) for delay_s in (3, 1, 2)]
            over = Late(trio.current_time() + 2)
            for call in (*calls, Late(None), over):
                deadlines.add(call)
            deadlines.forget(over)
            deadlines.forget(over)
            await trio.sleep(2.5)
            assert missed == [calls[1], calls[2]]
            await trio.sleep(1)
            assert missed == [calls[1], calls[2], calls[0]]
            assert len(deadlines) == 0
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# ---- in the scheduler, whose steps take 64 entries, and 16 beside decodes


def at(delay_s):
    return time.monotonic() + delay_s


async def ended(result, error=TimedOut, words="nothing was appended"):
    with pytest.raises(error, match=words) as caught:
        await result.wait()
    return caught.value.errno


async def test_a_deadline_that_is_kept_changes_nothing_and_one_that_has_passed_is_missed_at_once(bench):
    file, late = bench.file(), bench.file()
    await bench.submit(file, [1, 2], deadline_s=at(LATER_S)).wait()
    assert file.table.read()[0].tolist() == [1, 2]
    assert len(bench.batches._calls.deadlines) == 0, "nothing refers to a call that is over"
    assert await ended(bench.submit(late, [1, 2], deadline_s=at(-1))) == errno.ETIMEDOUT
    assert late.table.length == 0
    assert len(bench.steps.batches) == 1, "no step began with it"


async def test_a_call_that_is_ready_or_behind_another_one_is_ended_while_a_step_holds_others(bench):
    held = await bench.held(lambda: bench.submit(bench.file(), [9]))
    file = bench.file()
    await ended(bench.submit(file, [1, 2], deadline_s=at(SOON_S)))  # before the step has ended
    assert not held.is_over
    assert file.table.reservation is None
    bench.steps.gate.set()
    await held.wait()
    assert file.table.length == 0

    first = await bench.held(lambda: bench.submit(file, [1]))
    late, third = bench.submit(file, [2], deadline_s=at(SOON_S)), bench.submit(file, [3])
    await ended(late)
    assert not first.is_over
    bench.steps.gate.set()
    await third.wait()
    assert file.table.read()[0].tolist() == [1, 3], "the next on its file goes on"


async def test_a_call_that_a_step_computes_is_left_alone_or_ends_with_it_if_more_would_follow(bench):
    short, long = bench.file(), bench.file()
    for file, num_tokens in ((short, 3), (long, 100)):
        call = await bench.held(lambda: bench.submit(file, list(range(num_tokens)), deadline_s=at(SOON_S)))  # noqa: B023
        await trio.sleep(2 * SOON_S)
        assert not call.is_over, "a step is computing some of it"
        bench.steps.gate.set()
        await (call.wait() if file is short else ended(call))
    assert (short.table.length, long.table.length) == (3, 0)
    assert bench.steps.batches == [[(0, 3)], [(0, 64)]]
    await bench.submit(long, [5]).wait()


# ---- through the gate


@pytest.fixture
def asking(tmp_path):
    return Requests(tmp_path, limits=StepLimits())


def test_the_deadline_of_a_request_counts_from_when_it_is_taken(asking):
    ((_, _, error),) = asking.send(pred(int32(1), args=(1, 0, 1, 0))).replies[1]
    assert isinstance(error, TimedOut)
    assert asking.tokens == []
    for deadline_us in (60_000_000, (1 << 63) - 1):  # and what no clock can reach is none
        ((args, _, error),) = asking.send(pred(int32(1), args=(1, 0, deadline_us, 0))).replies[1]
        assert (args[2], error) == (1, None)


@pytest.mark.slow
def test_a_generation_ends_with_what_it_has(asking, monkeypatch):
    step = asking.steps.step

    def slow_step(batch):
        time.sleep(0.002)  # room for 4 s
        step(batch)

    monkeypatch.setattr(asking.steps, "step", slow_step)
    ((args, _, error),) = asking.send(
        generate(int32(1, 2) + GREEDY + options(deadline_us=1), args=(2, 0, 4, 0))
    ).replies[1]
    assert (args, error, asking.tokens) == ((0, 0, Finish.DEADLINE, -1), None, [])
    payload = int32(1) + GREEDY + options(deadline_us=300_000, stop_at_end=False)
    replies = asking.send(generate(payload, args=(1, 0, 0, 0))).replies[1]
    args, _, error = replies[-1]
    assert error is None
    assert args[2] == Finish.DEADLINE
    num_tokens = sum(args[0] for args, _, _ in replies)
    assert 0 < num_tokens < 8000
    assert args[1] == len(asking.tokens) == num_tokens, "the last one is pending"


def test_a_grammar_that_is_being_compiled_does_not_hold_up_a_deadline(asking, monkeypatch):
    may_end, was_waited_for = threading.Event(), []
    monkeypatch.setattr(Grammars, "compile", lambda *_described: was_waited_for.append(may_end.wait(10)))
    asked = options(grammar={"kind": "json", "source": "{}"}, deadline_us=100_000)
    ((args, _, error),) = asking.send(generate(int32(1) + GREEDY + asked)).replies[1]
    assert was_waited_for == []
    may_end.set()
    assert (args, error, asking.tokens) == ((0, 0, Finish.DEADLINE, -1), None, [])
