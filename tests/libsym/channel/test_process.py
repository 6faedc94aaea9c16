"""Reaching a daemon that is not there yet, or not any more."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import libsym as sym
from libsym.channel import process
from tests.libsym.echo_client import Daemon, start


class Place:
    """A socket's path at which a daemon may be started, and started again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.daemons: list[Daemon] = []

    def start(self) -> Daemon:
        self.path.unlink(missing_ok=True)
        self.daemons.append(start(self.path))
        return self.daemons[-1]


class Pauses:
    """Clock on which time passes only in sleeps; a daemon appears in the third pause."""

    def __init__(self, during_third: Callable[[], object] = lambda: None) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        self._during_third = during_third

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s.append(seconds)
        if len(self.slept_s) == 3:
            self._during_third()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    sym.close()
    found = Place(tmp_path / "daemon.sock")
    monkeypatch.setenv("SYMPHONY_SOCKET", str(found.path))
    yield found
    sym.close()
    for daemon in found.daemons:
        daemon.kill()


def test_a_daemon_that_appears_later_is_reached(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(place.start)
    monkeypatch.setattr(time, "sleep", pauses.sleep)
    sym.connect(wait=60)
    assert sym.tokenize("x") == [120]
    assert len(pauses.slept_s) == 3


def test_connect_sees_that_a_daemon_has_gone_before_any_call_does(place: Place) -> None:
    place.start()
    assert sym.tokenize("x") == [120]
    place.daemons[0].kill()
    place.start()
    sym.connect()
    assert sym.tokenize("y") == [121]


def test_the_last_try_is_when_the_time_is_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses()
    monkeypatch.setattr(process, "time", pauses)
    with pytest.raises(sym.NotConnected, match="no daemon listens"):
        sym.connect(place.path, wait=5)
    assert sum(pauses.slept_s) == pytest.approx(5)
    assert pauses.slept_s[0] < 0.05
    assert max(pauses.slept_s) < 0.5


@pytest.mark.parametrize("wait", [None, 0, 0.0])
def test_without_wait_there_is_one_try(place: Place, monkeypatch: pytest.MonkeyPatch, wait: float | None) -> None:
    pauses = Pauses()
    monkeypatch.setattr(process, "time", pauses)
    with pytest.raises(sym.NotConnected):
        sym.connect(wait=wait)
    assert pauses.slept_s == []


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("wait", [-1, float("nan"), "soon"])
def test_a_wait_that_is_no_time_is_invalid(wait: Any) -> None:
    with pytest.raises(sym.Invalid, match="give seconds"):
        sym.connect(wait=wait)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_waits_for_a_daemon_without_its_loop(place, monkeypatch, backend):
    pauses = Pauses(place.start)

    async def sleep(seconds: float) -> None:
        pauses.sleep(seconds)

    async def program() -> list[int]:
        await sym.aio.connect(wait=60)
        return await sym.aio.tokenize("x")

    monkeypatch.setattr("libsym.aio.sleep", sleep)
    assert anyio.run(program, backend=backend) == [120]
    assert len(pauses.slept_s) == 3


@pytest.mark.usefixtures("place")
def test_a_task_that_waits_for_a_daemon_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> bool:
        scope = anyio.CancelScope()

        async def sleep(_seconds: float) -> None:
            scope.cancel()
            await anyio.sleep_forever()

        monkeypatch.setattr("libsym.aio.sleep", sleep)
        with scope:
            await sym.aio.connect(wait=3600)
        return scope.cancelled_caught

    assert anyio.run(program, backend="trio")
