"""Cgroups of programs: their places, their limits, and their removal."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from symphony.launcher.common.places import Places, Refused
from symphony.launcher.machine.cgroup import Cgroups
from tests.symphony.launchers import ROOT, cgroups_of, end_process, eventually

MEMORY = 96 << 20
ENTER = "from symphony.launcher.common import walls; walls.enter({})"


@pytest.fixture
def cgroups(tmp_path):
    """The machine's own; nothing of it may stay."""
    found = Cgroups.find(tmp_path.name)
    if not found.kinds:
        pytest.skip("NO CGROUP TESTED: this process may make none")
    yield found
    assert not cgroups_of(tmp_path.name)


def needs(cgroups: Cgroups, kind: str) -> None:
    if kind not in cgroups.kinds:
        pytest.skip(f"NO LIMIT TESTED: there is no cgroup for {kind}")


def entering(group, source: str) -> list[str]:
    """The command of a Python program that enters the group first."""
    return [sys.executable, "-c", f"import os, time\n{ENTER.format(group.directories)}\n{source}"]


def inside(group, source: str) -> subprocess.CompletedProcess:
    return subprocess.run(entering(group, source), cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)


def test_it_is_told_when_the_kernel_ends_only_one_process(cgroups):
    needs(cgroups, "memory")

    async def see() -> int:
        group, lack = cgroups.make("a", MEMORY, None), asyncio.Event()
        with pytest.raises(Refused, match=r"no cgroup can be made for the program: /.*: File exists"):
            cgroups.make("a", None, None)
        group.watch_memory(lack.set)
        done = await asyncio.to_thread(inside, group, "kept = b'x' * (48 << 20); print(len(kept))")
        assert (done.stdout, group.ran_out_of_memory()) == ("50331648\n", False)
        child = "if os.fork() == 0:\n kept = b'x' * (256 << 20)\nprint(os.WTERMSIG(os.wait()[1]))"
        done = await asyncio.to_thread(inside, group, child)
        if done.returncode == 0:
            await asyncio.wait_for(lack.wait(), 10)
        assert group.ran_out_of_memory()
        await group.remove()
        return int(done.stdout or signal.SIGKILL)

    assert asyncio.run(see()) == signal.SIGKILL


def test_a_group_without_room_for_more_tasks_lets_fork_fail(cgroups):
    needs(cgroups, "pids")
    group = cgroups.make("a", None, 5)
    forks = """
pids = []
try:
    while True: pids.append(os.fork() or time.sleep(60))
except OSError as error: print(len(pids), error.errno)
for pid in pids: os.kill(pid, 9)
"""
    assert inside(group, forks).stdout == f"4 {errno.EAGAIN}\n"
    asyncio.run(group.remove())


def test_a_group_is_removed_as_soon_as_the_kernel_lets_go(cgroups):
    group = cgroups.make("a", MEMORY, 10)

    async def see() -> None:
        command = entering(group, "print(flush=True); time.sleep(60)")
        sleeper = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
        assert sleeper.stdout is not None
        await sleeper.stdout.readline()
        assert group.num_tasks() in (1, None)
        removal = asyncio.create_task(group.remove())
        await asyncio.sleep(0)
        assert all(map(os.path.isdir, group.directories))
        sleeper.kill()
        await sleeper.wait()
        await removal

    asyncio.run(see())
    assert not any(map(os.path.isdir, group.directories))


def test_the_next_launcher_removes_what_an_earlier_one_left(cgroups, tmp_path):
    left = cgroups.make("a", None, None)
    others = Cgroups.find(f"{tmp_path.name}x")
    other = others.make("a", None, None)
    Cgroups.find(tmp_path.name)
    assert not any(map(os.path.isdir, left.directories))
    assert all(map(os.path.isdir, other.directories))
    asyncio.run(other.remove())


# Version 2, of which the kernel's part is played: its files appear in each new directory.

FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.current": "4096",
    "memory.oom.group": "0",
    "memory.events": "oom 0\noom_kill 0\n",
    "pids.max": "max",
    "pids.current": "1",
}


class Kernel:
    """A hierarchy in which the process is at /own."""

    def __init__(self, base: Path, monkeypatch, controllers: str, *, busy: bool = False) -> None:
        self.own, self.proc = base / "cgroup" / "own", base / "proc"
        self.moved: list[int] = []
        self.own.parent.mkdir()
        self.proc.mkdir()
        (self.proc / "cgroup").write_text("0::/own\n")
        line = f"31 23 0:28 / {base}/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
        (self.proc / "mountinfo").write_text(line)
        files = {**FILES, "cgroup.controllers": controllers}
        real_mkdir, real_rmdir, real_write = Path.mkdir, Path.rmdir, os.write

        def mkdir(path, *words, **how):
            real_mkdir(path, *words, **how)
            for name, text in files.items():
                (path / name).write_text(text)

        def rmdir(path):
            for name in files:
                (path / name).unlink(missing_ok=True)
            real_rmdir(path)

        def write(file, raw):
            if raw.isdigit():
                self.moved.append(int(raw))
            if busy and raw.startswith(b"+"):
                raise OSError(16, "Device or resource busy")
            return real_write(file, raw)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)
        monkeypatch.setattr(os, "write", write)
        self.own.mkdir()

    def read(self, name: str) -> str:
        return (self.own / name).read_text()


def test_version_2_makes_groups_beside_a_leaf_for_the_launcher(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path, monkeypatch, "cpuset cpu io memory pids\n")
    cgroups = Cgroups.find("k", kernel.proc)
    assert cgroups.kinds == {"memory", "pids", "cpu"}
    assert kernel.read("launcher/cgroup.procs") == "0"
    assert kernel.read("cgroup.subtree_control") == "+cpu +memory +pids"
    group = cgroups.make("7", MEMORY, 12)
    assert group.directories == [str(kernel.own / "symphony-k-7")]
    assert kernel.read("symphony-k-7/memory.max")[: len(str(MEMORY))] == str(MEMORY)
    assert kernel.read("symphony-k-7/memory.swap.max")[:1] == "0"
    assert kernel.read("symphony-k-7/memory.oom.group") == "1"
    assert kernel.read("symphony-k-7/pids.max")[:2] == "12"
    assert not group.ran_out_of_memory()
    (kernel.own / "symphony-k-7" / "memory.events").write_text("oom 0\noom_kill 1\n")
    assert not group.ran_out_of_memory()
    (kernel.own / "symphony-k-7" / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert group.ran_out_of_memory()
    asyncio.run(group.remove())
    assert not (kernel.own / "symphony-k-7").exists()


def test_version_2_is_left_alone_where_others_are_in_the_cgroup(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path, monkeypatch, "memory pids", busy=True)
    assert Cgroups.find("k", kernel.proc).kinds == frozenset()
    assert not (kernel.own / "launcher").exists()
    assert kernel.read("cgroup.procs") == "0"


@pytest.mark.parametrize("delegated", [False, True])
def test_version_2_moves_its_own_children_and_where_the_cgroup_is_delegated_all(tmp_path, monkeypatch, delegated):
    """A service has the command and the launcher in one cgroup; elsewhere another process is somebody else's."""
    kernel = Kernel(tmp_path, monkeypatch, "memory pids")
    if delegated:
        os.setxattr(kernel.own, "user.delegate", b"1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (kernel.own / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n{child.pid}\n")
        assert Cgroups.find("k", kernel.proc).kinds == {"memory", "pids"}
        assert kernel.moved == [0, *([os.getppid()] if delegated else []), child.pid]
        child.communicate(b"\n")


def test_no_hierarchy_is_no_error(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("23 1 0:20 / / rw - ext4 /dev/vda rw\n")
    assert Cgroups.find("k", tmp_path).kinds == frozenset()


# Programs. Those that run into their limits are in test_launcher.py.


def test_an_isolated_program_lives_in_its_cgroups_with_half_of_the_memory_and_1024_tasks_and_leaves_none(
    own_launchers, cgroups
):
    launchers = own_launchers
    program = launchers.script("print(open('/proc/self/cgroup').read(), flush=True); time.sleep(600)")
    assert launchers.symphony("run", "-d", program).stdout == "prog\n"
    inside = eventually(lambda: launchers.symphony("logs", "prog").stdout)
    assert "symphony-" not in inside
    pid, limits = launchers.program("prog")["pid"], {}
    told = Path(f"/proc/{pid}/cgroup").read_text()
    assert told.count("/symphony-") == len(cgroups.kinds)
    for line in told.splitlines():
        kind, path = line.split(":")[1:]
        for name in ("memory.limit_in_bytes", "memory.max", "pids.max"):
            file = Path(f"/sys/fs/cgroup/{kind}{path}/{name}")
            if "symphony-" in path and file.exists():
                limits[name.partition(".")[0]] = file.read_text().strip()
    half = os.sysconf("SC_PHYS_PAGES") // 2 * 4096
    wanted = {"memory": str(half), "pids": "1024"}
    assert limits == {kind: limit for kind, limit in wanted.items() if kind in cgroups.kinds}
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    assert launchers.log.count("limits by cgroups: ") == 1
    end_process(pid)
    launchers.symphony("wait", "prog", check=False)
    eventually(lambda: not cgroups_of(Places(launchers.state, "").key))
