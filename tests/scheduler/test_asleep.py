"""The trio thread's sleep: calls that need no Python are carried out in it, and everything else wakes it as before."""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from libsym.abi import RANGE_END, ROWS_LAST, Op
from libsym.channel.hot import HOT_FUNCTIONS
from scheduler._loop import ffi
from scheduler.batch import asleep, standing
from scheduler.batch.asleep import Epoll
from tests.scheduler.standing_bench import COMPLETE_TAIL
from tests.scheduler.test_served_calls import Side

DAEMON_ASLEEP = 384
"""Offset of the daemon's word in the shared region."""
LENGTH = (Op.KV_READ, 0, 1, (RANGE_END, 0, 0, 0), b"")
FORK = (Op.KV_FORK, 0, 1, (0o600, 0, 0, 0), b"")
PING = (Op.PING, 0, 0, (0, 0, 0, 0), b"")


class Sleeper(Side):
    """A daemon whose first program is served by a task, as the listener's."""

    def __init__(self, directory):
        super().__init__(directory, is_served=True)
        self.lip = self.lips[0]
        self.num_woken = 0

    def run(self, scenario):
        """Run a scenario on a file of three entries, which is handle 1."""

        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.batches.run)
                await self.ask(self.lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
                tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3))
                await self.ask(self.lip, nursery, (Op.PRED, 0, 1, (3, 0, 0, 0), tokens))
                nursery.start_soon(self._serve, nursery)
                await trio.sleep(0.02)
                self.num_woken = 0
                await scenario()
                nursery.cancel_scope.cancel()

        trio.run(main)

    async def _serve(self, nursery):
        with suppress(trio.ClosedResourceError):
            while True:
                self.handle_all(self.lip, nursery)
                await trio.lowlevel.wait_readable(self.lip.channel.doorbell)
                self.num_woken += 1

    @property
    def num_replied(self):
        """Bytes of answers."""
        return int(np.frombuffer(self.lip.channel.memory[1], np.uint64, 64)[COMPLETE_TAIL // 8])

    def wait_until_it_sleeps(self):
        """Wait, in another thread, until the trio thread has done what came before."""
        until_s = time.monotonic() + 5
        while self.lip.channel.memory[1][DAEMON_ASLEEP] == 0 and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.01)

    async def answers(self, *frames, num=None):
        """Send calls, and return the errors and first numbers of so many answers: of theirs, if no number is given."""
        self.send(self.lip, frames)
        os.eventfd_write(self.lip.channel.doorbell, 1)
        found = []
        with trio.fail_after(10):
            while len(found) < (num or len(frames)):
                await trio.sleep(0.002)
                found += self.replies(self.lip)
        return [(err, args[0]) for _, err, _, args, _ in sorted(found)]


@pytest.fixture
def sleeper(tmp_path):
    return Sleeper(tmp_path / "side")


def test_calls_that_need_no_python_wake_nobody(sleeper):
    async def scenario():
        for call, answer in (
            (FORK, 2),
            (LENGTH, 0),
            (FORK, 3),
        ):  # each alone: of several some may be left, after 0.5 ms
            assert await sleeper.answers(call) == [(0, answer)]
        assert sleeper.num_woken == 0
        assert await sleeper.answers(FORK, PING, FORK) == [(0, 4), (0, 0), (0, 5)]
        assert sleeper.num_woken == 1
        assert await sleeper.answers(LENGTH) == [(0, 0)]
        assert sleeper.num_woken == 1, "and it sleeps as before"

    sleeper.run(scenario)


@pytest.mark.parametrize(("last", "num_woken"), [((Op.KV_CLOSE, 0, 2, (0, 0, 0, 0), b""), 0), (PING, 1)])
def test_a_call_that_the_run_sees_in_a_ring_wakes_nobody_without_need(tmp_path, monkeypatch, last, num_woken):
    """No client rings while the run looks at the program's ring."""
    hot = ffi.new("sym_hot_functions *", ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)[0])
    monkeypatch.setattr(standing, "HOT_FUNCTIONS", int(ffi.cast("uintptr_t", hot)))
    sleeper, num_replied, frames = Sleeper(tmp_path / "side"), 0, [last]

    @ffi.callback("int(sym_server *, int)")
    def unwatch(_server, _slept):
        if frames and sleeper.num_replied > num_replied:
            sleeper.wait_until_it_sleeps()
            sleeper.send(sleeper.lip, frames)
            frames.clear()
        return 1

    @ffi.callback("int(sym_server *)")
    def watch(_server):
        return 1

    async def scenario():
        await sleeper.answers(FORK)
        nonlocal num_replied
        num_replied = sleeper.num_replied
        hot.watch, hot.unwatch = watch, unwatch
        step = (Op.PRED, ROWS_LAST, 2, (1, 0, 0, 0), (7).to_bytes(4, "little"))
        assert len(await sleeper.answers(step, num=2)) == 2
        assert sleeper.num_woken == num_woken

    sleeper.run(scenario)


def test_deadlines_hold_while_calls_keep_coming(sleeper):
    ends = threading.Event()

    def keep_calling():
        num = 0
        while not ends.is_set():
            if not sleeper.replies(sleeper.lip) and num:
                time.sleep(0.0001)
                continue
            num += 1
            sleeper.send(sleeper.lip, [LENGTH])
            os.eventfd_write(sleeper.lip.channel.doorbell, 1)

    async def scenario():
        calls = threading.Thread(target=keep_calling)
        calls.start()
        try:
            for _ in range(20):
                began_s = time.monotonic()
                await trio.sleep(0.01)
                assert 0.01 <= time.monotonic() - began_s < 1
        finally:
            ends.set()
            calls.join()
        assert sleeper.gate.num_calls[Op.KV_READ] > 20

    sleeper.run(scenario)


def test_python_does_its_part_of_a_call_that_wakes_nobody(sleeper):
    """Pages that somebody waits for become free."""

    async def scenario():
        step = (Op.PRED, ROWS_LAST, 2, (1, 0, 0, 0), (7).to_bytes(4, "little"))
        await sleeper.answers(FORK)
        await sleeper.answers(step)
        sleeper.fs.pool.core.is_awaited = True
        await sleeper.answers((Op.KV_CLOSE, 0, 2, (0, 0, 0, 0), b""))
        with trio.fail_after(5):
            await sleeper.fs.pool.bell.wait()
        sleeper.fs.pool.core.is_awaited = False
        assert sleeper.fs.pool.core.news == 0
        assert sleeper.num_woken == 0

    sleeper.run(scenario)


def test_nothing_is_carried_out_before_calls_that_wait_for_slots(sleeper):
    async def scenario():
        channel = sleeper.lip.channel
        channel.take_rows(channel.num_slots)
        sleeper.lip.slots.wait(1, lambda _: None, lambda: True)
        await sleeper.answers(LENGTH)
        assert sleeper.num_woken == 1

    sleeper.run(scenario)


def test_a_trio_that_hides_its_epoll_is_named(sleeper, monkeypatch, caplog):
    hides = SimpleNamespace(runner=SimpleNamespace(io_manager=object()))
    monkeypatch.setattr(asleep, "GLOBAL_RUN_CONTEXT", hides)

    async def scenario():
        assert await sleeper.answers(FORK, LENGTH) == [(0, 2), (0, 0)]
        assert sleeper.num_woken == 1

    sleeper.run(scenario)
    assert f"trio {trio.__version__} hides its epoll" in caplog.text


def test_trio_has_its_own_epoll_back_in_the_end(sleeper):
    async def main():
        manager = trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager
        epoll = manager._epoll
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper.batches.run)
            await trio.sleep(0.01)
            assert isinstance(manager._epoll, Epoll)
            nursery.cancel_scope.cancel()
        assert manager._epoll is epoll

    trio.run(main)


def is_watched(fd):
    """Whether trio's epoll has a descriptor of that number."""
    epoll = trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager._epoll
    return re.search(rf"tfd: +{fd} ", Path(f"/proc/self/fdinfo/{epoll._fd}").read_text()) is not None


def test_the_doorbell_of_a_connection_that_ended_wakes_nobody(sleeper):
    """A client has a copy of it, and its number is the next connection's."""

    async def scenario():
        doorbell = sleeper.lip.channel.doorbell
        copy = os.dup(doorbell)
        assert is_watched(doorbell)
        await sleeper.gate.see_off(sleeper.lip)
        assert not is_watched(doorbell)
        os.close(copy)

    sleeper.run(scenario)


def test_a_signal_is_handled_while_the_thread_sleeps(sleeper):
    handled = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))
    try:

        async def scenario():
            began_s = time.monotonic()
            threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1]).start()
            await trio.sleep(0.3)
            assert time.monotonic() - began_s >= 0.3
            assert handled[0] - began_s < 0.25

        sleeper.run(scenario)
    finally:
        signal.signal(signal.SIGUSR1, before)
