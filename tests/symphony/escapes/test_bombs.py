"""Programs that take all that they can get: others are served meanwhile, the same user's, too, and nothing is left."""

import os
import pty

import pytest

from tests.symphony.escapes.house import PROGRAMS, STANDARD
from tests.symphony.launchers import eventually

PROGRAM = PROGRAMS / "bombs.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fork_and_flee", "descriptors_under_way", "terminals", "connections"])
def test_a_bomb_holds_up_no_other_program_and_ends_whole(house, ann, bob, name):
    """The kernel counts some things for a user, and not for a sandbox."""
    before = bob.descendants()
    bob.run(STANDARD, "-d", "--name", "bomb", PROGRAM, name)
    try:
        eventually(lambda: "got" in bob.symphony("logs", "bomb").stdout)
        for fd in pty.openpty():
            os.close(fd)
        for user in (ann, bob) if name != "connections" else (ann,):  # each user has a share of the handshakes
            assert user.run(STANDARD, user.script("print(len(sym.pred(sym.kv_create(), [1])))")).stdout == "1\n"
    finally:
        bob.symphony("kill", "-s", "KILL", "bomb")
    assert bob.symphony("wait", "bomb", check=False).stdout == "137\n"
    eventually(lambda: bob.descendants() <= before)
    assert house.daemon.process.poll() is None
