"""The channel between real programs and a real daemon: versions, living processes, and the bound on callers."""

import errno
import os
import signal
import socket
import struct

import anyio
import pytest

import libsym as sym
from libsym import abi


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


@pytest.mark.parametrize("version", [0, abi.ABI_OLDEST - 1, abi.ABI_VERSION + 1, 2**32 - 1])
def test_another_version_of_the_abi_is_refused_in_words(shared, version):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(shared.socket))
        connection.sendall(struct.pack("=IIQ", abi.MAGIC, version, 0))
        answer = connection.recv(4096)
    magic, ours, code, num_bytes = struct.unpack_from("=IIiI", answer)
    assert (magic, ours, code) == (abi.MAGIC, abi.ABI_VERSION, errno.EPROTO)
    text = answer[16 : 16 + num_bytes].decode()
    assert f"speaks ABI version {version}, this daemon {abi.ABI_OLDEST} to {abi.ABI_VERSION}: use one release" in text


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


THREADS = """
    from concurrent.futures import ThreadPoolExecutor
    def loop(seed):
        with sym.kv_create() as kv:
            tokens, found = [seed], []
            for _ in range(3):
                tokens = [sym.pred(kv, tokens).argmax()]
                found += tokens
            return found
    with ThreadPoolExecutor(50) as pool:
        print(list(pool.map(loop, range(100, 150))), flush=True)
"""


@pytest.mark.slow
def test_five_hundred_threads_of_ten_programs_get_what_one_would_get_alone(shared):
    alone = shared.run(THREADS)
    outputs = [program.communicate(timeout=110) for program in [shared.program(THREADS) for _ in range(10)]]
    assert [err for _, err in outputs if err] == []
    assert {out for out, _ in outputs} == {alone}


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_a_thousand_tasks_of_one_program_get_what_one_would_get_alone():
    answers: dict[int, list[int]] = {}

    async def loop(number):
        async with await sym.aio.kv_create() as kv:
            tokens, answers[number] = [100 + number % 10], []
            for _ in range(2):
                tokens = [(await sym.aio.pred(kv, tokens)).argmax()]
                answers[number] += tokens

    async def main():
        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(loop, number)

    anyio.run(main, backend="trio")
    assert len(answers) == 1000
    assert all(len(found) == 2 and found == answers[number % 10] for number, found in answers.items())
