"""Branches in the run: Python takes them over when they end by anything but their close."""

import os
import time

import pytest

from libsym.abi import Op
from libsym.errors import StepFailed
from scheduler._loop import ffi, lib
from scheduler.batch import member as members
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from tests.scheduler.served_bench import close, fork, framed, length, pred


@pytest.mark.parametrize("is_stated", [True, False])
async def test_a_branch_that_has_used_up_its_room_is_taken_over(side, is_stated):
    side.batches.gate.max_positions = 41
    handle = await side.branch(40)
    await side.call(pred(handle, 5))  # no room behind it
    await side.ask(length(handle))
    assert len(side.batches._run.stays) == side.batches.num_waiting == 1
    if is_stated:
        await side.ask(framed(Op.KV_STAT, handle))
        await side.call(framed(Op.KV_TRUNCATE, handle, 3))
        assert await side.call(pred(handle, 5)) == 1


async def test_what_ended_is_not_read_out_of_memory_that_has_been_given_back(side, monkeypatch):
    num_freed = 0

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def sym_stay_free(self, stay):
            nonlocal num_freed
            num_freed += 1
            ffi.memmove(stay, os.urandom(ffi.sizeof("sym_member")), ffi.sizeof("sym_member"))

    monkeypatch.setattr(members, "lib", Library())
    handle = await side.branch(10)
    await side.call(pred(handle, 5))
    await side.computing(pred(handle, 5))
    side.steps.failure = RuntimeError("no step")
    side.steps.gate.set()
    replies = await side.answered()
    side.steps.failure = None
    assert [(number, code) for number, code, *_ in replies] == [(1, StepFailed("").errno)]
    assert num_freed
    assert (await side.ask(length(handle)))[0][3][1] == 11


async def test_what_the_core_says_when_branches_are_shown_is_heard(side):
    handle = await side.branch(10)
    await side.call(pred(handle, 5))
    await side.call(pred(await side.call(fork(1)), 5))  # into a copy of the last page
    core = side.fs.pool.core
    core.is_awaited = True  # a call waits for frames, and the branch has given back a page
    side.batches.sync()
    core.is_awaited = False
    assert not core.news


async def test_pages_of_a_branch_in_the_run_are_pinned(side):
    handle = await side.branch(40)
    await side.until(lambda: not side.fs.pool.num_pinned)
    await side.call(pred(handle, 5))
    pinned = side.fs.pool.num_pinned
    await side.call(close(handle))
    assert (pinned, side.fs.pool.num_pinned) == (2, 0)


async def test_the_status_of_a_program_has_what_was_computed_for_its_branches(side):
    control = Control(side.fs, side.batches, side.gate, side.programs, side.text, HeldTimes())
    handle = await side.branch(10)
    await side.call(pred(handle, 5))
    await side.call(close(handle))
    shown = {
        name: value.strip() for name, _, value in (line.partition(":") for line in control.status(4711).splitlines())
    }
    assert shown["tokens"] == "11"
    assert int(shown["bytes_in"]) > 0, "and what has passed through its rings"


async def test_calls_of_a_traced_run_have_even_numbers_and_those_of_the_core_odd_ones(side):
    began_ns = time.monotonic_ns()
    run = side.batches._run
    run.steps.trace(True)
    for handle in [await side.branch(10) for _ in range(3)]:
        await side.call(pred(handle, 5))
    steps, seats = run.steps.traced_since(0)
    assert len(steps) == 6, "the first one, too"
    assert len(set(seats["call"].tolist())) == 6
    assert (seats["call"] % 2).tolist() == [0, 0, 0, 1, 1, 1]
    times = [began_ns, *seats["arrived_ns"].tolist(), time.monotonic_ns()]
    assert times == sorted(times)
