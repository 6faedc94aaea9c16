"""Changes that wait for calls on their file: the length of the wait, and the fate of abandoned changes."""

from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfs.mount.eager import Eager
from kvfs.mount.waiting_changes import PATIENCE_S, WaitingChanges, at_once
from kvfs.names.content import KvFile
from libsym.errors import Busy, Invalid

FILE = cast(KvFile, "the file")


class Appending:
    """A file with a call on it that is in flight until `end`, and the changes that it had."""

    def __init__(self):
        self.done = []
        self._actions: list[Any] = []
        self._changes = WaitingChanges(Eager(), lambda _file, action: self._actions.append(action))

    def run_test(self, body):
        trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))

    async def cut(self):
        await self._changes.change(FILE, "a.kv", lambda: self.done.append("cut"))

    async def cut_too_long(self):
        def refuse():
            raise Invalid("too long")

        with pytest.raises(Invalid, match="too long"):
            await self._changes.change(FILE, "a.kv", refuse)

    def end(self):
        for action in self._actions:
            action()
        self._actions.clear()


@pytest.fixture
def file():
    return Appending()


def test_a_file_that_nobody_appends_to_is_changed_without_a_task():
    done, eager = [], Eager()
    change = WaitingChanges(eager, at_once).change(FILE, "a.kv", lambda: done.append("cut"))
    assert eager.start(change) is None
    assert done == ["cut"]


async def test_a_change_is_made_when_no_call_appends_any_more_and_its_error_told_to_who_waits(file):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.cut)
        nursery.start_soon(file.cut_too_long)
        await trio.sleep(PATIENCE_S * 0.9)
        assert file.done == []
        file.end()
        assert file.done == ["cut"], "at once, before any other call begins"


async def test_a_wait_in_vain_is_busy_and_nothing_is_changed_later(file):
    began_s = trio.current_time()
    with pytest.raises(Busy, match=r"a\.kv: .* try again"):
        await file.cut()
    assert trio.current_time() - began_s == pytest.approx(PATIENCE_S)
    file.end()
    assert file.done == []


async def test_a_wait_that_is_interrupted_changes_nothing(file):
    with trio.move_on_after(1) as scope:
        await file.cut()
    assert scope.cancelled_caught
    file.end()
    assert file.done == []
