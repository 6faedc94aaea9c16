"""Files that are opened or computed: once, whole or not there, and whoever fails leaves nothing; and directories."""

import signal
import subprocess
from typing import Any

import anyio
import pytest

import libsym
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

sym: Any = libsym
"""Without its types: some arguments are wrong ones."""


@pytest.fixture
def connected(emptied):
    before = sym.daemon_stat()["used_files"]
    yield emptied
    for entry in sym.kv_list():
        if entry.kind == "kv":
            sym.kv_remove(entry.name)
    eventually(lambda: sym.daemon_stat()["used_files"] - before == len([*emptied.mount.rglob("*")]))


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
    assert (connected.mount / "a.kv").stat().st_mode & 0o777 == 0o640
    assert len((connected.mount / "a.kv").read_bytes()) == sym.kv_stat("a.kv").size


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


@pytest.mark.parametrize("backend", ["asyncio"])
async def test_in_an_event_loop_a_plain_function_may_fill_it_and_what_does_not_is_told_so(connected, backend):
    async def tokens(_kv):
        return [1, 2, 3]

    with pytest.raises(sym.Invalid, match="empty: kv_write"):
        await sym.aio.kv_open_or_compute("a.kv", tokens)
    for compute in (coroutine, lambda kv: kv.write([1])):
        kv = await sym.aio.kv_open_or_compute("a.kv", compute)
        assert (await sym.aio.kv_stat(kv)).tokens == 1
        await sym.aio.kv_remove(kv)


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


async def test_tasks_compute_once_and_a_cancelled_one_leaves_nothing(connected, backend):
    computed = []
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
    assert len(computed) == 1


def test_a_task_cancelled_as_its_claim_comes_keeps_nobody_waiting(connected):
    """The program calls nothing afterwards: the claim must not come back with its next call only."""
    program = connected.program("""
        import asyncio
        async def main():
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
        asyncio.run(main())
    """)
    assert program.stdout.readline() == "cancelled\n", program.communicate("\n")
    assert connected.run('print(sym.kv_open_or_compute("a.kv", [2]).read()[0])') == "[2]\n"
    program.communicate("\n", timeout=60)


def test_a_file_that_is_made_in_another_way_meanwhile_is_the_file(connected):
    def compute(kv):
        sym.kv_write(kv, [1])
        with sym.kv_create("a.kv") as other:
            sym.kv_write(other, [8, 9])

    with sym.kv_open_or_compute("a.kv", compute) as kv:
        assert sym.kv_read(kv)[0] == [8, 9]
    sym.kv_truncate(sym.kv_open("a.kv", "rw"), 0)
    with sym.kv_open_or_compute("a.kv", [1, 2]) as kv:
        assert kv.len() == 0, "an empty file is a file, and is left alone"


@pytest.mark.parametrize(
    ("path", "words", "error"),
    [
        ("none/a.kv", {}, sym.NotFound),
        ("plain.txt", {}, sym.Invalid),
        (".", {}, sym.IsDirectory),
        ("new/", {}, sym.IsDirectory),
        ("nowhere", {}, sym.Exists),
        ("/etc/a.kv", {}, sym.CrossDevice),
        ("a.kv", {"mode": 0o10000}, sym.Invalid),
    ],
)
def test_what_can_not_be_opened_or_made_says_so_before_anything_is_computed(connected, path, words, error):
    (connected.mount / "plain.txt").write_text("no image")
    (connected.mount / "nowhere").symlink_to("none")
    with pytest.raises(error):
        sym.kv_open_or_compute(path, lambda _kv: pytest.fail("computed"), **words)


# ---- directories


def test_directories_are_made_with_all_above_them(connected):
    with pytest.raises(sym.NotFound):
        sym.kv_mkdir("a/b/c")
    sym.kv_mkdir("a/b/c", 0o750, parents=True)
    sym.kv_mkdir(f"{connected.mount}/a/b/../b/d/", parents=True)
    assert [entry.name for entry in sym.kv_list("a/b")] == ["c", "d"]
    modes = [(connected.mount / path).stat().st_mode & 0o777 for path in ("a", "a/b/c", "a/b/d")]
    assert modes == [0o750, 0o750, 0o700]
    sym.kv_mkdir("a/b", parents=True)
    with pytest.raises(sym.Exists):
        sym.kv_mkdir("a/b")


@pytest.mark.parametrize("path", [".", "./a/./b", "dd//e/../f/", "dd/e/..", "dd/."])
def test_with_parents_a_path_is_taken_as_mkdir_p_takes_it(connected, tmp_path, path):
    def made(root):
        return sorted(str(below.relative_to(root)) for below in root.glob("**/*"))

    subprocess.run(["mkdir", "-p", path], cwd=tmp_path, check=True)
    sym.kv_mkdir(path, parents=True)
    assert made(connected.mount) == made(tmp_path)


def test_a_file_is_no_directory_to_make_one_in_or_over(connected):
    sym.kv_create("a.kv").close()
    for parents in (True, False):
        with pytest.raises(sym.Exists):
            sym.kv_mkdir("a.kv", parents=parents)
        with pytest.raises(sym.NotDirectory):
            sym.kv_mkdir("a.kv/b", parents=parents)
        with pytest.raises(sym.CrossDevice):
            sym.kv_mkdir("/none/of/the/mount", parents=parents)
