"""Connections of a program that take long to close, on a kernel that lets descriptors pass."""

import asyncio
import os
import socket
import threading

import pytest

from symphony.launcher.machine import last_close
from symphony.launcher.machine.last_close import MAX_THREADS_OF_A_PROGRAM, Closer
from symphony.launcher.supervising.program import LaunchedProgram, Record
from tests.scheduler.weapons import HUNG_S, kernel_can_refuse, lingering

NO_OPTION = 9999


@pytest.fixture
def older_kernel(monkeypatch):
    monkeypatch.setattr(last_close, "SO_PASSRIGHTS", NO_OPTION)


def armed(weapon):
    """A connection with a packet that nobody has read."""
    theirs, ours = socket.socketpair()
    made = weapon()
    socket.send_fds(theirs, [b"x"], [made])
    os.close(made)
    theirs.close()
    return ours


@pytest.mark.skipif(not kernel_can_refuse(), reason="NO REFUSAL TESTED: it needs Linux 6.16")
def test_a_connection_that_takes_no_descriptors_needs_no_thread():
    theirs, ours = socket.socketpair()
    last_close.refuse_descriptors(ours)
    before = threading.active_count()
    with theirs:
        Closer().close(ours)
        assert theirs.recv(1) == b""
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.usefixtures("older_kernel")
def test_a_program_whose_closes_hang_is_not_accepted_until_one_ends(tmp_path):
    async def scenario():
        program = LaunchedProgram(tmp_path / "p", RECORD, None)
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        program.listen(lambda _program, connection: accepted.put_nowait(connection))
        with socket.socket(socket.AF_UNIX) as client:
            with lingering() as weapon:
                for number in range(MAX_THREADS_OF_A_PROGRAM):
                    assert program.closer.has_room, number
                    program.closer.close(armed(weapon))
                client.connect(str(program.socket_path))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(accepted.get(), 0.5)
            (await asyncio.wait_for(accepted.get(), HUNG_S)).close()
        program.stop_listening()

    asyncio.run(scenario())


RECORD = Record(
    id="0000000a",
    name="p",
    program="p",
    args=[],
    cwd="/",
    uid=0,
    parent=None,
    detached=False,
    tty=False,
    limits={},
    created=0,
    isolation="none",
)
