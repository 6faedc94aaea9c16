"""Programs that take all that they can get are ended, nothing of them is left, and others are served meanwhile."""

import os
import pty

import pytest

from tests.symphony.escapes.bombs import BOMBS, PROGRAM, explode, neighbour
from tests.symphony.escapes.house import STANDARD
from tests.symphony.launchers import eventually

ENDED_BY = {"--processes": 123, "--memory": 120}
TOO_LONG = 124
MAX_MIB = 300
"""A sandbox's own files take 256 MiB at most."""


@pytest.fixture(scope="module")
def beside(ann):
    """A program of another user, which is served throughout."""
    with neighbour(ann) as program:
        yield program


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.title)
def test_a_bomb_is_ended_and_others_are_served_meanwhile(house, bob, beside, bomb):
    bob.run(STANDARD, bob.script(""))
    before, free = bob.descendants(), bytes_free()
    beside.begin(1.0)
    found = explode(bob, bomb)
    assert found["status"] == next((ENDED_BY[each] for each in bomb.limits if each in ENDED_BY), TOO_LONG), found
    assert beside.milliseconds()["calls"] > 5
    eventually(lambda: bob.descendants() <= before)
    assert house.daemon.process.poll() is None
    assert bob.run(STANDARD, bob.script("print(sym.pred(sym.kv_create(), [1]).argmax())")).stdout
    assert bytes_free() > free - (1 << 30), "what it wrote is on the disk"
    if bomb.name == "hidden_memory":
        assert found["got"] == {"MiB": 0}, "memory that no limit counts"
    if bomb.name == "disk":
        assert sum(each for each in found["got"].values() if isinstance(each, int)) <= MAX_MIB, found


def bytes_free():
    found = os.statvfs("/")
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("bomb", [each for each in BOMBS if "descriptors" in each.name or "terminals" in each.name])
def test_while_it_holds_descriptors_the_same_user_can_start_programs_and_terminals(bob, bomb):
    """The kernel counts some things for a user, and not for a sandbox."""
    bob.run(STANDARD, "-d", "--name", "holder", "--time", "30s", PROGRAM, bomb.name)
    try:
        eventually(lambda: "got" in bob.symphony("logs", "holder").stdout)
        for fd in pty.openpty():
            os.close(fd)
        assert bob.run(STANDARD, bob.script("print(sym.getpid() > 0)")).stdout == "True\n"
    finally:
        bob.symphony("kill", "-s", "KILL", "holder")
        bob.symphony("wait", "holder", check=False)
