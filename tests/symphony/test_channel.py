"""The channel between real programs and a real daemon: versions, living processes, and the bound on callers."""

import os
import signal
import socket
import struct

import anyio
import pytest

import libsym as sym
from libsym import abi


@pytest.mark.slow
def test_a_program_that_is_killed_in_the_middle_leaves_nothing(emptied):
    program = emptied.program("""
        kv = sym.kv_create()
        sym.kv_write(kv, [1] * 500)
        print("ready", flush=True)
        while True:
            sym.kv_truncate(kv, 0)
            sym.kv_write(kv, [1] * 2000)
    """)
    assert program.stdout.readline() == "ready\n"
    assert sym.daemon_stat()["lips"] == 2
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=30)


@pytest.mark.slow
def test_a_program_that_ended_is_gone_even_if_a_child_has_its_socket(shared):
    """The child comes of fork(2) behind Python's back, and so keeps every descriptor."""
    program = shared.program(
        """
        import ctypes
        kv = sym.kv_create("left.kv")
        sym.kv_lock(kv)
        libc = ctypes.CDLL(None)
        child = libc.fork()
        if child == 0:
            libc.pause()
        print(child, flush=True)
        os._exit(0)
        """
    )
    child = int(program.stdout.readline())
    try:
        assert program.wait() == 0
        with sym.kv_open("left.kv", "rw") as kv, sym.kv_lock(kv):
            assert os.path.exists(f"/proc/{child}"), "the child is still there"  # noqa: PTH110
    finally:
        os.kill(child, signal.SIGKILL)
        program.communicate()


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"),
    [
        (abi.ABI_OLDEST, 0, abi.ABI_OLDEST),
        (abi.ABI_VERSION, abi.ABI_VERSION, abi.ABI_VERSION),
        (abi.ABI_VERSION + 3, abi.ABI_OLDEST, abi.ABI_VERSION),
    ],
)
def test_the_version_that_both_speak_is_in_the_welcome_and_in_the_region(shared, newest, oldest, spoken):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(shared.socket))
        connection.sendall(struct.pack("=IIII", abi.MAGIC, newest, oldest, 0))
        welcome, fds, _, _ = socket.recv_fds(connection, 4096, 3)
        assert struct.unpack("=IIiI", welcome) == (abi.MAGIC, spoken, 0, 0)
        assert struct.unpack("=II", os.pread(fds[0], 8, 0)) == (abi.MAGIC, spoken)
        for fd in fds:
            os.close(fd)


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
async def test_a_thousand_tasks_of_one_program_get_what_one_would_get_alone():
    answers: dict[int, list[int]] = {}

    async def loop(number):
        async with await sym.aio.kv_create() as kv:
            tokens, answers[number] = [100 + number % 10], []
            for _ in range(2):
                tokens = [(await sym.aio.pred(kv, tokens)).argmax()]
                answers[number] += tokens

    async with anyio.create_task_group() as tasks:
        for number in range(1000):
            tasks.start_soon(loop, number)
    assert len(answers) == 1000
    assert all(len(found) == 2 and found == answers[number % 10] for number, found in answers.items())
