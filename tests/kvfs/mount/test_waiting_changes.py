"""Changes that wait for calls on their file: the length of the wait, and the fate of abandoned changes."""

import pytest
import trio
import trio.testing

from kvfs.mount.eager import Eager
from kvfs.mount.waiting_changes import PATIENCE_S, WaitingChanges, at_once
from libsym.errors import Busy, Invalid


class Appending:
    """A call on the file is in flight until `end`."""

    def __init__(self):
        self.actions = []

    def exclusive(self, _file, action):
        self.actions.append(action)

    def end(self):
        for action in self.actions:
            action()
        self.actions.clear()


@pytest.fixture
def appending():
    return Appending()


@pytest.fixture
def changes(appending):
    return WaitingChanges(Eager(), appending.exclusive)


def run(main):
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_file_that_nobody_appends_to_is_changed_without_a_task():
    done, eager = [], Eager()
    change = WaitingChanges(eager, at_once).change("the file", "a.kv", lambda: done.append("cut"))
    assert eager.start(change) is None
    assert done == ["cut"]


def test_a_change_is_made_when_no_call_appends_any_more(changes, appending):
    async def main():
        done = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(changes.change, "the file", "a.kv", lambda: done.append("cut"))
            await trio.sleep(PATIENCE_S * 0.9)
            assert done == []
            appending.end()
            assert done == ["cut"], "at once, before any other call begins"

    run(main)


def test_what_a_change_raises_is_told_to_who_waits(changes, appending):
    async def main():
        def refuse():
            raise Invalid("too long")

        async with trio.open_nursery() as nursery:

            async def change():
                with pytest.raises(Invalid, match="too long"):
                    await changes.change("the file", "a.kv", refuse)

            nursery.start_soon(change)
            await trio.sleep(1)
            appending.end()

    run(main)


def test_a_wait_in_vain_is_busy_and_nothing_is_changed_later(changes, appending):
    async def main():
        done, began_s = [], trio.current_time()
        with pytest.raises(Busy, match=r"a\.kv: .* try again"):
            await changes.change("the file", "a.kv", lambda: done.append("cut"))
        assert trio.current_time() - began_s == pytest.approx(PATIENCE_S)
        appending.end()
        assert done == []

    run(main)


def test_a_wait_that_is_interrupted_changes_nothing(changes, appending):
    async def main():
        done = []
        with trio.move_on_after(1) as scope:
            await changes.change("the file", "a.kv", lambda: done.append("cut"))
        assert scope.cancelled_caught
        appending.end()
        assert done == []

    run(main)
