"""Branches in the run: Python takes them over when they end by anything but their close."""

import os
import struct
import time

import pytest
import trio

from libsym.abi import RANGE_END, ROWS_LAST, ROWS_NONE, Op
from libsym.errors import StepFailed
from scheduler._loop import ffi, lib
from scheduler.batch import member as members
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from tests.scheduler.test_served_calls import Side


def fork(handle):
    return Op.KV_FORK, 0, handle, (0o600, 0, 0, 0), b""


def pred(handle):
    return Op.PRED, ROWS_LAST, handle, (1, 0, 0, 0), struct.pack("=i", 5)


def length(handle):
    return Op.KV_READ, 0, handle, (RANGE_END, 0, 0, 0), b""


class OneSide(Side):
    """A daemon's gate, and one program of it."""

    def __init__(self, path):
        super().__init__(path / "served", is_served=True)
        self.lip = self.lips[0]

    def play(self, scenario):
        """Run it beside the scheduler; the books are right after it, and after the program has gone."""

        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.batches.run)
                await scenario(nursery)
                self.fs.check()
                await self.gate.see_off(self.lip)
                await self.until(lambda: not self.batches.num_waiting)
                nursery.cancel_scope.cancel()

        trio.run(main)
        self.fs.check()

    async def call(self, nursery, frame):
        ((_, code, _, args, _),) = await self.ask(self.lip, nursery, frame)
        assert not code
        return args[0]

    async def branch(self, nursery, num_entries):
        file = await self.call(nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
        tokens = struct.pack(f"={num_entries}i", *[7] * num_entries)
        await self.ask(self.lip, nursery, (Op.PRED, ROWS_NONE, file, (num_entries, 0, 0, 0), tokens))
        return await self.call(nursery, fork(file))

    async def computing(self, nursery, frame):
        """A call is in a step, which goes on when `steps.gate` is set."""
        self.steps.gate.clear()
        while self.steps.entered.acquire(blocking=False):
            pass
        self.send(self.lip, [frame])
        self.handle_all(self.lip, nursery)
        await self.until(lambda: self.steps.entered.acquire(blocking=False))


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_branch_that_has_used_up_its_room_is_taken_over(tmp_path, is_stated):
    side = OneSide(tmp_path)

    async def scenario(nursery):
        side.batches.gate.max_positions = 41
        handle = await side.branch(nursery, 40)
        await side.call(nursery, pred(handle))  # no room behind it
        await side.ask(side.lip, nursery, length(handle))
        assert len(side.batches._run.stays) == side.batches.num_waiting == 1
        if is_stated:
            await side.ask(side.lip, nursery, (Op.KV_STAT, 0, handle, (0, 0, 0, 0), b""))
            await side.call(nursery, (Op.KV_TRUNCATE, 0, handle, (3, 0, 0, 0), b""))
            assert await side.call(nursery, pred(handle)) == 1

    side.play(scenario)


def test_what_ended_is_not_read_out_of_memory_that_has_been_given_back(tmp_path, monkeypatch):
    side, num_freed = OneSide(tmp_path), 0

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def sym_stay_free(self, stay):
            nonlocal num_freed
            num_freed += 1
            ffi.memmove(stay, os.urandom(ffi.sizeof("sym_member")), ffi.sizeof("sym_member"))

    monkeypatch.setattr(members, "lib", Library())

    async def scenario(nursery):
        handle = await side.branch(nursery, 10)
        await side.call(nursery, pred(handle))
        await side.computing(nursery, pred(handle))
        side.steps.failure = RuntimeError("no step")
        side.steps.gate.set()
        replies = []
        await side.until(lambda: replies.extend(side.replies(side.lip)) or replies)
        side.steps.failure = None
        assert [(number, code) for number, code, *_ in replies] == [(1, StepFailed("").errno)]
        assert num_freed
        assert (await side.ask(side.lip, nursery, length(handle)))[0][3][1] == 11

    side.play(scenario)


def test_what_the_core_says_when_branches_are_shown_is_heard(tmp_path):
    side = OneSide(tmp_path)

    async def scenario(nursery):
        handle = await side.branch(nursery, 10)
        await side.call(nursery, pred(handle))
        await side.call(nursery, pred(await side.call(nursery, fork(1))))  # into a copy of the last page
        core = side.fs.pool.core
        core.is_awaited = True  # a call waits for frames, and the branch has given back a page
        side.batches.sync()
        core.is_awaited = False
        assert not core.news

    side.play(scenario)


def test_pages_of_a_branch_in_the_run_are_pinned(tmp_path):
    side = OneSide(tmp_path)

    async def scenario(nursery):
        handle = await side.branch(nursery, 40)
        await side.until(lambda: not side.fs.pool.num_pinned)
        await side.call(nursery, pred(handle))
        pinned = side.fs.pool.num_pinned
        await side.call(nursery, (Op.KV_CLOSE, 0, handle, (0, 0, 0, 0), b""))
        assert (pinned, side.fs.pool.num_pinned) == (2, 0)

    side.play(scenario)


def test_the_status_of_a_program_has_what_was_computed_for_its_branches(tmp_path):
    side = OneSide(tmp_path)

    async def scenario(nursery):
        control = Control(side.fs, side.batches, side.gate, side.programs, side.text, HeldTimes())
        handle = await side.branch(nursery, 10)
        await side.call(nursery, pred(handle))
        await side.call(nursery, (Op.KV_CLOSE, 0, handle, (0, 0, 0, 0), b""))
        shown = dict(line.split() for line in control.status(4711).splitlines() if line.startswith("tokens:"))
        assert shown == {"tokens:": "11"}

    side.play(scenario)


def test_closing_a_branch_does_not_wake_the_scheduler(tmp_path):
    side = OneSide(tmp_path)

    async def scenario(nursery):
        await side.branch(nursery, 10)
        counts = side.batches._run.steps.counts

        async def wakes_of_closes():
            num_wakes = 0
            for _ in range(50):
                handle = await side.call(nursery, fork(1))
                await side.call(nursery, pred(handle))
                num_before = counts().num_wakes
                await side.call(nursery, (Op.KV_CLOSE, 0, handle, (0, 0, 0, 0), b""))
                num_wakes += counts().num_wakes - num_before
            return num_wakes

        rounds = [await wakes_of_closes() for _ in range(4)]
        assert min(rounds) < 25  # some for its ring; a loaded machine disturbs a round

    side.play(scenario)


def test_calls_of_a_traced_run_have_even_numbers_and_those_of_the_core_odd_ones(tmp_path):
    side, began_ns = OneSide(tmp_path), time.monotonic_ns()

    async def scenario(nursery):
        run = side.batches._run
        run.steps.trace(True)
        for handle in [await side.branch(nursery, 10) for _ in range(3)]:
            await side.call(nursery, pred(handle))
        steps, seats = run.steps.traced_since(0)
        assert len(steps) == 6, "the first one, too"
        assert len(set(seats["call"].tolist())) == 6
        assert (seats["call"] % 2).tolist() == [0, 0, 0, 1, 1, 1]
        times = [began_ns, *seats["arrived_ns"].tolist(), time.monotonic_ns()]
        assert times == sorted(times)

    side.play(scenario)
