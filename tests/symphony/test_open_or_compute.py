"""Files that are opened or computed: once, whole or not there, and whoever fails leaves nothing; and directories."""

from __future__ import annotations

import select
import signal
import subprocess
import time

import anyio
import pytest

import libsym as sym
from libsym.abi import OPEN_WRITE, Op
from libsym.channel.process import process
from libsym.channel.scripts import Call


@pytest.fixture
def connected(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    before = sym.daemon_stat()
    yield daemon
    for entry in sym.kv_list():
        assert entry.kind == "kv", entry
        sym.kv_remove(entry.name)
    end_s = time.monotonic() + 10  # a file counts until the kernel has forgotten it
    while (after := sym.daemon_stat())["used_files"] != before["used_files"] and time.monotonic() < end_s:
        time.sleep(0.01)
    assert after["num_free_pages"] == before["num_free_pages"], "the test leaks pages"
    assert after["used_files"] == before["used_files"], "the test leaks a file"
    sym.daemon_check()
    sym.close()


def names():
    return [entry.name for entry in sym.kv_list()]


def test_it_is_computed_once_and_opened_ever_after(connected):
    given = []

    def compute(kv):
        given.append((kv.path, kv.writable, kv.len(), names()))
        sym.kv_write(kv, [1, 2])
        sym.kv_write(kv, [3])

    for flags, writable in (("r", False), ("rw", True)):
        with sym.kv_open_or_compute("a.kv", compute, flags, mode=0o640) as kv:
            assert (kv.path, kv.writable, sym.kv_read(kv)[0]) == ("a.kv", writable, [1, 2, 3])
    assert given == [(None, True, 0, [])], "the file has no name while it is computed"
    assert oct((connected.mount / "a.kv").stat().st_mode)[-3:] == "640"


async def coroutine(kv):
    await sym.aio.kv_write(kv, [1])


def closing(kv):
    with kv:
        sym.kv_write(kv, [1])


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda _kv: [1, 2, 3], "left the file that was to be a.kv empty: kv_write"),
        (lambda _kv: (token for token in [1]), "empty: kv_write"),
        (coroutine, "a coroutine function, which nobody awaits"),
        (closing, "closed the file that was to be a.kv"),
    ],
)
def test_a_function_that_does_not_fill_its_file_is_told_so_and_leaves_nothing(connected, compute, message):
    with pytest.raises(sym.Invalid, match=message):
        sym.kv_open_or_compute("a.kv", compute)
    assert names() == []
    sym.kv_open_or_compute("a.kv", [1, 2]).close()


def test_in_an_event_loop_a_plain_function_may_fill_it_and_what_does_not_is_told_so(connected):
    async def tokens(_kv):
        return [1, 2, 3]

    async def main():
        with pytest.raises(sym.Invalid, match="empty: kv_write"):
            await sym.aio.kv_open_or_compute("a.kv", tokens)
        for compute in (coroutine, lambda kv: kv.write([1])):
            kv = await sym.aio.kv_open_or_compute("a.kv", compute)
            assert (await sym.aio.kv_stat(kv)).tokens == 1
            await sym.aio.kv_remove(kv)

    anyio.run(main)


def test_a_generation_that_compute_leaves_behind_ends_when_the_file_gets_its_name(connected):
    left = []

    def compute(kv):
        left.append(sym.generate(kv, [1, 2, 3], stop_at_end=False))
        next(left[0])

    with sym.kv_open_or_compute("a.kv", compute) as kv:
        assert 3 <= kv.len() < sym.model_info().max_positions - 1
    left[0].cancel()
    assert left[0].finish == "cancelled"


@pytest.mark.parametrize("flags", ["r", "rw"])
def test_who_computes_it_gets_the_file_as_others_open_it(connected, flags):
    with sym.kv_open_or_compute("a.kv", [1, 2, 3], flags) as kv:
        assert sym.kv_stat(kv).ino == sym.kv_stat("a.kv").ino
        if flags == "rw":
            sym.kv_write(kv, [4])
        else:
            with pytest.raises(sym.NoAccess, match="open for reading only"):
                sym.kv_write(kv, [4])
            with pytest.raises(sym.BadHandle, match="opened for reading only"):
                sym.kv_truncate(kv, 0)
        sym.kv_remove(kv)
    assert names() == []


COMPUTE = """
    def compute(kv):
        print("computing", flush=True)
        sys.stdin.readline()
        sym.kv_write(kv, [int(sys.argv[1])] * 100)
    print(sym.kv_read(sym.kv_open_or_compute("a.kv", compute))[0][0], flush=True)
"""


def test_of_programs_that_want_the_same_file_one_computes_it(connected):
    programs = [connected.program(COMPUTE, str(i)) for i in range(4)]
    first = first_to_compute(programs)
    assert names() == []
    first.stdin.write("\n")
    first.stdin.flush()  # communicate() with another one would wait for what it never got
    outputs = [program.communicate(timeout=60) for program in programs]
    assert [program.returncode for program in programs] == [0] * 4, outputs
    assert {out.splitlines()[-1] for out, _ in outputs} == {str(programs.index(first))}
    assert not any("computing" in out for out, _ in outputs), "no other computed"


def first_to_compute(programs):
    """The program that prints first; the others wait for it."""
    poll = select.poll()  # select() takes no descriptor above 1,023
    by_fd = {program.stdout.fileno(): program for program in programs}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    ((fd, _),) = poll.poll(60_000)
    program = by_fd[fd]
    assert program.stdout.readline() == "computing\n"
    return program


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_it_is_killed_the_next_one_computes(connected, number):
    first = connected.program(COMPUTE, "1")
    assert first.stdout.readline() == "computing\n"
    second = connected.program(COMPUTE, "2")
    first.send_signal(number)
    assert second.stdout.readline() == "computing\n"
    assert names() == []
    out, err = second.communicate("\n", timeout=60)
    assert out == "2\n", err
    first.communicate(timeout=60)


def test_what_fails_while_it_is_computed_leaves_nothing(connected):
    def fail(kv):
        sym.kv_write(kv, [1] * 100)
        raise ZeroDivisionError

    for compute, error in ((fail, ZeroDivisionError), ([-1], sym.Invalid), ("text", sym.Invalid), (7, sym.Invalid)):
        with pytest.raises(error):
            sym.kv_open_or_compute("a.kv", compute)
        assert names() == []
    with sym.kv_open_or_compute("a.kv", [1]) as kv:
        assert kv.len() == 1


def test_who_waits_can_be_interrupted_and_leaves_nothing(connected):
    computing = connected.program(COMPUTE, "1")
    assert computing.stdout.readline() == "computing\n"
    waiting = connected.program("""
        import signal
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            sym.kv_open_or_compute("a.kv", [1])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(sys.stdin.readline(), flush=True)
    """)
    assert waiting.stdout.readline() == "interrupted\n"
    out, err = computing.communicate("\n", timeout=60)  # the claim is free: nobody who is gone gets it
    assert out == "1\n", err
    sym.kv_remove("a.kv")
    with sym.kv_open_or_compute("a.kv", [5]) as kv:
        assert sym.kv_read(kv)[0] == [5]
    waiting.communicate("\n", timeout=60)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_tasks_compute_once_and_a_cancelled_one_leaves_nothing(connected, backend):
    computed = []

    async def main():
        began = anyio.Event()

        async def stuck(kv):
            await sym.aio.kv_write(kv, [1])
            began.set()
            await anyio.sleep_forever()

        async def compute(kv):
            computed.append(kv)
            await sym.aio.kv_write(kv, [2, 3])

        async def want():
            async with await sym.aio.kv_open_or_compute("a.kv", compute) as kv:
                assert (await sym.aio.kv_read(kv))[0] == [2, 3]

        async with anyio.create_task_group() as tasks, anyio.create_task_group() as first:
            first.start_soon(sym.aio.kv_open_or_compute, "a.kv", stuck)
            await began.wait()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(want)
                await anyio.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()  # and takes no claim with it
            for _ in range(5):
                tasks.start_soon(want)
            first.cancel_scope.cancel()

    anyio.run(main, backend=backend)
    assert len(computed) == 1


def test_a_task_cancelled_as_its_claim_comes_keeps_nobody_waiting(connected):
    """The program calls nothing afterwards: the claim must not come back with its next call only."""
    program = connected.program("""
        import asyncio
        async def main():
            sys.stdin.readline()
            task = asyncio.create_task(sym.aio.kv_open_or_compute("a.kv", [1]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # it has asked
            while int(status("handles")) == 0:
                pass  # the answer has come, and the loop has not looked
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                print("cancelled", flush=True)
            sys.stdin.readline()
        def status(field):
            with open(path) as lines:
                return dict(line.split(":") for line in lines)[field]
        path = f"{sym.model_info().mount}/.symphony/proc/{os.getpid()}/status"
        print("ready", flush=True)
        asyncio.run(main())
    """)
    assert program.stdout.readline() == "ready\n"
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "cancelled\n", program.communicate("\n")
    assert connected.run('print(sym.kv_open_or_compute("a.kv", [2]).read()[0])') == "[2]\n"
    program.communicate("\n", timeout=60)


def test_a_claim_that_is_dropped_unseen_is_given_back_without_another_call(connected):
    stream = process.channel().stream(Call(Op.KV_CLAIM, args=(0o600, 0, 0, 0), payload=b"a.kv"))
    stream.next()  # as one whose task or thread is interrupted before it has a file of the reply
    assert connected.run('print(sym.kv_open_or_compute("a.kv", [2]).read()[0])') == "[2]\n"


def test_a_file_that_is_made_in_another_way_meanwhile_is_the_file(connected):
    def compute(kv):
        sym.kv_write(kv, [1])
        with sym.kv_create("a.kv") as other:
            sym.kv_write(other, [8, 9])

    with sym.kv_open_or_compute("a.kv", compute) as kv:
        assert sym.kv_read(kv)[0] == [8, 9]


def test_an_empty_file_is_a_file_and_is_left_alone(connected):
    sym.kv_create("a.kv").close()
    with sym.kv_open_or_compute("a.kv", [1, 2]) as kv:
        assert kv.len() == 0


def test_what_can_not_be_opened_or_made_says_so_before_anything_is_computed(connected):
    (connected.mount / "plain.txt").write_text("no image")
    (connected.mount / "nowhere").symlink_to("none")
    try:
        for path, error in (
            ("none/a.kv", sym.NotFound),
            ("plain.txt", sym.Invalid),
            (".", sym.IsDirectory),
            ("new/", sym.IsDirectory),
            ("nowhere", sym.Exists),
            ("/etc/a.kv", sym.CrossDevice),
        ):
            with pytest.raises(error):
                sym.kv_open_or_compute(path, lambda _kv: pytest.fail("computed"))
        with pytest.raises(sym.Invalid):
            sym.kv_open_or_compute("a.kv", lambda _kv: pytest.fail("computed"), mode=0o10000)
        with pytest.raises(sym.Invalid, match="flags='w'"):
            sym.kv_open_or_compute("a.kv", lambda _kv: pytest.fail("computed"), "w")
    finally:
        (connected.mount / "plain.txt").unlink()
        (connected.mount / "nowhere").unlink()


def test_a_file_without_a_claim_is_given_no_name(connected):
    with sym.kv_create() as kv, pytest.raises(sym.Invalid, match="has claimed no name"):
        process.channel().call(Op.KV_NAME, flags=OPEN_WRITE, handle=kv.handle)


def test_a_directory_that_goes_meanwhile_takes_the_name_with_it(connected):
    sym.kv_mkdir("d")

    def compute(kv):
        sym.kv_write(kv, [1])
        (connected.mount / "d").rmdir()

    with pytest.raises(sym.NotFound):
        sym.kv_open_or_compute("d/a.kv", compute)


def test_the_mount_sees_the_file_as_any_other(connected):
    with sym.kv_open_or_compute("a.kv", [1] * 40) as kv:
        size = sym.kv_stat(kv).size
    assert len((connected.mount / "a.kv").read_bytes()) == size == (connected.mount / "a.kv").stat().st_size


# ---- directories


def test_directories_are_made_with_all_above_them(connected):
    with pytest.raises(sym.NotFound):
        sym.kv_mkdir("a/b/c")
    sym.kv_mkdir("a/b/c", 0o750, parents=True)
    sym.kv_mkdir(f"{connected.mount}/a/b/../b/d/", parents=True)
    assert [entry.name for entry in sym.kv_list("a/b")] == ["c", "d"]
    assert [oct((connected.mount / path).stat().st_mode)[-3:] for path in ("a", "a/b/c", "a/b/d")] == [
        "750",
        "750",
        "700",
    ]
    sym.kv_mkdir("a/b", parents=True)
    with pytest.raises(sym.Exists):
        sym.kv_mkdir("a/b")
    for path in ("a/b/c", "a/b/d", "a/b", "a"):
        (connected.mount / path).rmdir()


@pytest.mark.parametrize("path", [".", "./a/./b", "dd//e/../f/", "dd/e/..", "dd/."])
def test_with_parents_a_path_is_taken_as_mkdir_p_takes_it(connected, tmp_path, path):
    def made(root):
        return sorted(str(below.relative_to(root)) for below in root.glob("**/*"))

    subprocess.run(["mkdir", "-p", path], cwd=tmp_path, check=True)
    sym.kv_mkdir(path, parents=True)
    assert made(connected.mount) == made(tmp_path)
    for below in reversed(made(connected.mount)):
        (connected.mount / below).rmdir()


def test_a_file_is_no_directory_to_make_one_in_or_over(connected):
    sym.kv_create("a.kv").close()
    for parents in (True, False):
        with pytest.raises(sym.Exists):
            sym.kv_mkdir("a.kv", parents=parents)
        with pytest.raises(sym.NotDirectory):
            sym.kv_mkdir("a.kv/b", parents=parents)
        with pytest.raises(sym.CrossDevice):
            sym.kv_mkdir("/none/of/the/mount", parents=parents)
