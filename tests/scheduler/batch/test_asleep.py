"""The trio thread's sleep: calls that need no Python are carried out in it, and everything else wakes it as before."""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from libsym.abi import Op
from libsym.channel.hot import HOT_FUNCTIONS
from scheduler._loop import ffi
from scheduler.batch import asleep, standing
from scheduler.batch.asleep import Epoll
from tests.scheduler.served_bench import CREATE, PING, Side, close, fork, length, pred

DAEMON_ASLEEP = 384
"""Offset of the daemon's word in the shared region."""
MOST_CALLS = 10_000
"""Calls that come one after the other and take seconds. A daemon that is held up answers them all first."""
HUNG_S = 30
"""Time after which a wait counts as hung."""
LENGTH, FORK = length(1), fork(1)


class Sleeper(Side):
    """A daemon whose first program is served by a task, as the listener's."""

    num_woken = 0

    def run_test(self, scenario):
        """Run a scenario on a file of three entries, which is handle 1."""

        async def main():
            await self.ask(CREATE)
            await self.ask(pred(1, 1, 2, 3, flags=0))
            self.nursery.start_soon(self._serve)
            await trio.testing.wait_all_tasks_blocked(0.02)  # else its first waking could be counted
            self.num_woken = 0
            await scenario()

        super().run_test(main)

    async def _serve(self):
        with suppress(trio.ClosedResourceError, OSError):  # the connection has ended
            while True:
                self.handle_all()
                await trio.lowlevel.wait_readable(self.program.channel.doorbell)
                self.num_woken += 1

    def wait_until_it_sleeps(self):
        """Wait, in another thread, until the trio thread has done what came before."""
        until_s = time.monotonic() + 5
        while self.program.channel.memory[1][DAEMON_ASLEEP] == 0 and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.01)

    async def answers(self, *frames, num=None):
        """Send calls, and return the errors and first numbers of so many answers: of theirs, if no number is given."""
        self.send(frames)
        os.eventfd_write(self.program.channel.doorbell, 1)
        found = list[tuple]()
        with trio.fail_after(10):
            while len(found) < (num or len(frames)):
                await trio.sleep(0.002)
                found += self.replies()
        return [(err, args[0]) for _, err, _, args, _ in sorted(found)]


@pytest.fixture
def sleeper(tmp_path):
    return Sleeper(tmp_path)


async def test_calls_that_need_no_python_wake_nobody(sleeper):
    for call, answer in ((FORK, 2), (LENGTH, 0), (FORK, 3)):  # each alone: of several some may be left, after 0.5 ms
        assert await sleeper.answers(call) == [(0, answer)]
    assert sleeper.num_woken == 0
    assert await sleeper.answers(FORK, PING, FORK) == [(0, 4), (0, 0), (0, 5)]
    assert sleeper.num_woken == 1
    assert await sleeper.answers(LENGTH) == [(0, 0)]
    assert sleeper.num_woken == 1, "and it sleeps as before"


@pytest.fixture
def hot(monkeypatch):
    """The run's own copy of libsym's functions. It is made before a sleeper."""
    found = ffi.new("sym_hot_functions *", ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)[0])
    monkeypatch.setattr(standing, "HOT_FUNCTIONS", int(ffi.cast("uintptr_t", found)))
    return found


@pytest.mark.parametrize(("last", "num_woken"), [(close(2), 0), (PING, 1)])
async def test_a_call_that_the_run_sees_in_a_ring_wakes_nobody_without_need(hot, sleeper, last, num_woken):
    """No client rings while the run looks at the program's ring."""
    frames = [last]
    await sleeper.answers(fork(1))
    num_replied = sleeper.rings[sleeper.program].num_replied

    @ffi.callback("int(sym_server *, int)")
    def unwatch(_server, _slept):
        if frames and sleeper.rings[sleeper.program].num_replied > num_replied:
            sleeper.wait_until_it_sleeps()
            sleeper.send(frames)
            frames.clear()
        return 1

    @ffi.callback("int(sym_server *)")
    def watch(_server):
        return 1

    hot.watch, hot.unwatch = watch, unwatch
    assert len(await sleeper.answers(pred(2, 7), num=2)) == 2
    assert sleeper.num_woken == num_woken


async def test_deadlines_hold_while_calls_keep_coming(sleeper):
    ends, calls_are_over = threading.Event(), False

    def keep_calling():
        nonlocal calls_are_over
        for _ in range(MOST_CALLS):
            sleeper.send([LENGTH])
            os.eventfd_write(sleeper.program.channel.doorbell, 1)
            while not sleeper.replies():
                if ends.wait(0.0001):
                    return
        calls_are_over = True

    calls = threading.Thread(target=keep_calling)
    calls.start()
    try:
        for _ in range(5):
            await trio.sleep(0.01)
            assert not calls_are_over
    finally:
        ends.set()
        calls.join()
    assert sleeper.gate.num_calls[Op.KV_READ] > 20


async def test_python_does_its_part_of_a_call_that_wakes_nobody(sleeper):
    """Pages that somebody waits for become free."""
    await sleeper.answers(FORK)
    await sleeper.answers(pred(2, 7))
    sleeper.fs.pool.core.is_awaited = True
    await sleeper.answers(close(2))
    with trio.fail_after(5):
        await sleeper.fs.pool.bell.wait()
    sleeper.fs.pool.core.is_awaited = False
    assert sleeper.fs.pool.core.news == 0
    assert sleeper.num_woken == 0


async def test_nothing_is_carried_out_before_calls_that_wait_for_slots(sleeper):
    channel = sleeper.program.channel
    channel.take_rows(channel.num_slots)
    sleeper.program.slots.wait(1, lambda _: None, lambda: True)
    await sleeper.answers(LENGTH)
    assert sleeper.num_woken == 1


@pytest.fixture
def hidden(monkeypatch):
    hides = SimpleNamespace(runner=SimpleNamespace(io_manager=object()))
    monkeypatch.setattr(asleep, "GLOBAL_RUN_CONTEXT", hides)


async def test_a_trio_that_hides_its_epoll_is_named(hidden, sleeper, caplog):
    assert await sleeper.answers(FORK, LENGTH) == [(0, 2), (0, 0)]
    assert sleeper.num_woken == 1
    assert f"trio {trio.__version__} hides its epoll" in caplog.text


def io_manager():
    return trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager


def test_trio_has_its_own_epoll_back_in_the_end(sleeper):
    async def main():
        epoll = io_manager()._epoll
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper.batches.run)
            await trio.sleep(0.01)
            assert isinstance(io_manager()._epoll, Epoll)
            nursery.cancel_scope.cancel()
        assert io_manager()._epoll is epoll

    trio.run(main)


def is_watched(fd):
    """Whether trio's epoll has a descriptor of that number."""
    return re.search(rf"tfd: +{fd} ", Path(f"/proc/self/fdinfo/{io_manager()._epoll._fd}").read_text()) is not None


async def test_the_doorbell_of_a_connection_that_ended_wakes_nobody(sleeper):
    """A client has a copy of it, and its number is the next connection's."""
    doorbell = sleeper.program.channel.doorbell
    copy = os.dup(doorbell)
    assert is_watched(doorbell)
    await sleeper.gate.see_off(sleeper.program)
    assert not is_watched(doorbell)
    os.close(copy)
    sleeper.program = sleeper.lips[1]


async def test_a_signal_is_handled_while_the_thread_sleeps(sleeper):
    """Nothing else wakes the thread."""
    handled, sleeping = threading.Event(), threading.get_ident()

    def interrupt():
        sleeper.wait_until_it_sleeps()
        signal.pthread_kill(sleeping, signal.SIGUSR1)
        return handled.wait(HUNG_S)

    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    try:
        assert await trio.to_thread.run_sync(interrupt)
    finally:
        signal.signal(signal.SIGUSR1, before)
