"""spawn, wait and kill: calls that the daemon hands on to the launcher of the calling program, and its answers."""

import errno
import os
import threading
from typing import Any

import anyio
import pytest

import libsym as sym
from tests.symphony.fake_launcher import FakeLauncher
from tests.symphony.launchers import eventually

CHILD = {"ok": True, "id": "1f2e3d4c", "name": "child", "pid": 4242}


@pytest.fixture
def launcher(shared, tmp_path):
    """A launcher that has this process as a program."""
    sym.close()
    launcher: Any = FakeLauncher(shared.socket, tmp_path)
    launcher.number = launcher.start("parent")
    sym.connect(launcher.socket_of(launcher.number))
    yield launcher
    sym.close()
    launcher.close()


def in_a_thread(call):
    """Start a call in a thread. Return the thread, and a list that gets the result or the error."""
    found = []

    def run():
        try:
            found.append(call())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return found, thread


def until_it_waits(launcher, call):
    """The daemon has these calls of this program."""
    waits = ("waiting for a program", call)
    eventually(lambda: waits in [(each.state, each.call) for each in sym.programs() if each.id == launcher.number])


def answer_by(launcher, do, answer):
    """Have the launcher give one answer; what it is asked, as it comes."""
    asked: list[dict] = []

    def answered(found):
        asked.append(found)
        return answer

    launcher.answer_by[do] = answered
    return asked


@pytest.mark.slow
def test_spawn_and_kill_ask_the_launcher_and_give_what_it_says(launcher):
    asked = answer_by(launcher, "spawn", CHILD)
    about: dict[str, Any] = {"name": "child", "env": {"KEY": "vä=lue"}, "cwd": "/tmp", "detached": True}
    about |= {"restart": "on-failure", "limits": {"tokens": 100, "time": 1.5}}
    assert sym.spawn("child.py", ["a", "b c"], **about) == sym.Child("1f2e3d4c", "child", 4242)
    del asked[0]["d"]
    assert asked == [{"do": "spawn", "by": launcher.number, "program": "child.py", "args": ["a", "b c"], **about}]
    asked = answer_by(launcher, "kill", {"ok": True})
    sym.kill("1f2e3d4c")
    sym.kill(sym.Child("00000001", "child", 1), 9)
    found = [(each["by"], each["id"], each["signal"]) for each in asked]
    assert found == [(launcher.number, "1f2e3d4c", 15), (launcher.number, "00000001", 9)]
    answer_by(launcher, "spawn", {"error": "no such program: a.py", "errno": errno.ENOENT})
    with pytest.raises(sym.NotFound, match=r"no such program: a\.py"):
        sym.spawn("a.py")


def test_waits_may_take_long_and_hold_nobody_up(launcher):
    waits = [in_a_thread(lambda number=number: sym.wait(f"{number:08x}")) for number in range(5)]
    asked = [launcher.asked.get(timeout=20) for _ in waits]
    assert sorted(each["id"] for each in asked) == [f"{number:08x}" for number in range(5)]
    with sym.kv_create() as kv:
        assert kv.write([1, 2, 3]) == 3
    for each in reversed(asked):
        launcher.answer(each, ok=True, status=int(each["id"]), reason="exit")
    for number, (found, thread) in enumerate(waits):
        thread.join(20)
        assert found == [sym.Ended(number, "exit")]


def test_two_that_wait_for_one_program_ask_once(launcher):
    first = in_a_thread(lambda: sym.wait("1f2e3d4c"))
    asked = launcher.asked.get(timeout=20)
    second = in_a_thread(lambda: sym.wait("1f2e3d4c"))
    until_it_waits(launcher, "wait (2)")
    launcher.answer(asked, ok=True, status=3, reason="exit")
    for found, thread in (first, second):
        thread.join(20)
        assert found == [sym.Ended(3, "exit")]
    assert launcher.asked.empty()


async def cancelled(launcher, call, *args):
    """Cancel a call when the launcher has been asked. Return the request."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, *args)
        asked = await anyio.to_thread.run_sync(lambda: launcher.asked.get(timeout=20))
        tasks.cancel_scope.cancel()
    await sym.aio.programs()  # the daemon answers after it has read the cancellation
    return asked


async def test_a_wait_that_is_cancelled_ends_and_the_next_one_is_answered(launcher):
    async def wait():
        assert await sym.aio.wait("1f2e3d4c") == sym.Ended(0, "exit")

    asked = await cancelled(launcher, sym.aio.wait, "1f2e3d4c")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.to_thread.run_sync(until_it_waits, launcher, "wait")
        launcher.answer(asked, ok=True, status=0, reason="exit")


async def test_a_child_whose_spawn_was_cancelled_is_ended(launcher):
    asked = await cancelled(launcher, sym.aio.spawn, "child.py")
    launcher.answer(asked, **CHILD)
    killed = await anyio.to_thread.run_sync(lambda: launcher.asked.get(timeout=20))
    assert (killed["do"], killed["id"], killed["signal"]) == ("kill", CHILD["id"], 9)


def test_what_waits_for_a_launcher_that_goes_fails(launcher):
    waits = [in_a_thread(lambda: sym.wait("1f2e3d4c")), in_a_thread(lambda: sym.spawn("child.py"))]
    for _ in waits:
        launcher.asked.get(timeout=20)
    launcher.close()
    for found, thread in waits:
        thread.join(20)
        assert "the launcher of this program has gone" in str(found[0])
        assert found[0].errno == errno.EHOSTDOWN


def test_a_program_that_no_launcher_started_is_told_what_to_do(shared):
    for call in (lambda: sym.spawn("a.py"), lambda: sym.wait("1f2e3d4c"), lambda: sym.kill("1f2e3d4c")):
        with pytest.raises(sym.NotSupported, match="start it with `symphony run`"):
            call()


def test_a_connection_of_a_domain_starts_nothing_and_sees_its_own_program_alone(launcher, shared):
    sym.close()
    (shared.mount / "guests").mkdir()
    os.setxattr(shared.mount / "guests", "user.kv.quota", b"1M")
    sym.connect(launcher.socket_of(other := launcher.start("gateway")), domain="guests")
    with pytest.raises(sym.NotPermitted, match="confined to a domain"):
        sym.spawn("a.py")
    assert [each.id for each in sym.programs(ended=True)] == [other]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"program": ""}, "needs the program"),
    ({"program": "a\0b"}, "needs the program"),
    ({"args": ["a\0"]}, "without NUL"),
    ({"env": {"A=B": "c"}}, "names without ="),
    ({"name": "n" * 65}, "at most 64"),
    ({"limits": {"tokens": -1}}, "0 to"),
    ({"limits": {"tokens": 1.5}}, "a number is needed"),
    ({"limits": {"time": "long"}}, "a number is needed"),
    ({"restart": "always"}, "on-failure"),
    ({"args": ["x" * 70_000]}, "message of .* bytes for the launcher"),
    ({"args": ["x"] * 5000}, "at most 4096 texts"),
]


def test_a_spawn_that_makes_no_sense_reaches_no_launcher(launcher):
    for wrong, why in WRONG:
        with pytest.raises(sym.SymError, match=why):
            sym.spawn(**{"program": "a.py", **wrong})
    assert launcher.asked.empty()


def test_a_spawn_for_another_machine_says_what_it_lacks(launcher):
    with pytest.raises(sym.NotFound, match="this daemon is in no fleet"):
        sym.spawn("child.py", fleet=True)
    with pytest.raises(sym.Invalid, match="near chooses the machine"):
        sym.spawn("child.py", near="a.kv")
    with pytest.raises(sym.Invalid, match="takes no cwd"):
        sym.spawn("child.py", fleet=True, cwd="/tmp")
    with sym.kv_create() as kv, pytest.raises(sym.Invalid, match="is no path"):
        sym.spawn("child.py", fleet=True, near=kv)
    assert launcher.asked.empty()
