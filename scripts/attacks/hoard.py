#!/usr/bin/env python3
"""Hoarding: one user makes as many objects as possible, of each kind that a user can make the daemon keep.

    .venv/bin/python scripts/attacks/hoard.py [--quick] [--tree CHECKOUT] [--only CASE ...]

Each case runs once with quotas and once with the defaults, in a control group of GROUP_BYTES if the script can make
one. The checks for each kind of object are:

- The growth of the daemon's memory exceeds neither the bytes charged to the user nor the user's memory quota by more
  than SLACK_BYTES.
- The log grows at most by LOG_BYTES.
- The growth of the disk exceeds the memory quota by at most SLACK_BYTES, since each file needs a block. If the user is
  charged more bytes for files than the memory quota, those bytes are the limit instead. `--quota` and `--disk` limit
  these bytes; by default the file system's free space does.
- The 99th percentile of another user's pred() is at most MOST times its value beside the same number of harmless
  programs.
- All memory and disk space is free again when the user's processes and files are gone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacked import ATTACKER, ROOT, VICTIM, Daemon, daemon, memory_bytes, running_as, verdict

import libsym as sym

SLACK_BYTES = 24 << 20
"""Memory and disk that no object accounts for: buffers, touched pages, gaps of the heap."""
LOG_BYTES = 256 << 10
GROUP_BYTES = 1 << 30
MOST = 1.5
QUOTAS = ("--quota", "8M", "--quota-files", 2000, "--programs", 2)
MEMORY, QUICK_MEMORY = "16M", "2M"
NOTHING = {"used_bytes": 0, "memory_bytes": 0, "quota_memory": 0, "holds": {}}
UNCOUNTED = ("threads", "frames", "programs", "log")
"""Kinds whose count is not checked. When the script checks, the daemon may have freed some of these objects, or may
count them under another kind.
"""
COUNTED_PART = 0.5
"""The daemon must count at least this share of the objects that were made. Some threads may not have called yet."""
TRIES = 3
"""Number of tries. A percentile beyond MOST, or memory that is not freed, is a failure only if all tries show it."""


@dataclass(frozen=True)
class Effort:
    """Effort of a trial: how long the attacker makes objects of one kind, and how exactly the victim is measured."""

    seconds: float
    processes: int
    preds: int
    slack_s: float
    is_quick: bool


FULL, QUICK = Effort(6, 2, 200, 0.005, is_quick=False), Effort(0.1, 1, 10, 1.0, is_quick=True)

CASES = {
    "files": "files",
    "names": "files",
    "symlinks": "files",
    "attributes": "files",
    "unlinked": "files",
    "domains": "domains",
    "opens": "opens",
    "directories": "opens",
    "control": "opens",
    "flocks": "opens",
    "plain": "open plain files",
    "versions": "versions",
    "waits": "requests",
    "texts": "texts",
    "handles": "handles",
    "locks": "handles",
    "claims": "handles",
    "calls": "calls",
    "threads": "calls",
    "watchers": "calls",
    "frames": "frames",
    "messages": "messages",
    "topics": "topics",
    "connections": "connections",
    "programs": "programs",
    "log": "lines",
}
"""Cases, and the kind under which the daemon counts their objects (`kvfs.pages.holdings`)."""

HOARD = """
    from libsym.channel.process import process
    from libsym.calls.computed import claim_script
    mount, socket_path = sys.argv[1:]
    mine = f"u{os.getuid()}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(128 << 10)
    kept, failed = [], []

    def create(name):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))

    def files(k):
        for i in itertools.count():
            yield create(f"{k}-{i:0250}")

    def names(k):
        create(f"one{k}")
        for i in itertools.count():
            yield os.link(f"one{k}", f"{k}-{i:0250}")

    def symlinks(k):
        for i in itertools.count():
            yield os.symlink("x" * 4000, f"{k}-{i:0250}")

    def attributes(k):
        for i in itertools.count():
            create(f"{k}-{i}")
            yield os.setxattr(f"{k}-{i}", "user.x", bytes(60_000))

    def unlinked(k):
        for i in itertools.count():
            create(f"{k}-held")
            kept.append(os.open(f"{k}-held", os.O_PATH))
            yield os.unlink(f"{k}-held")

    def domains(k):
        for i in itertools.count():
            os.mkdir(f"{k}-{i}")
            yield os.setxattr(f"{k}-{i}", "user.kv.quota", b"1M")

    def opens(k):
        while True:
            yield kept.append(os.open("a.kv", os.O_RDONLY))

    def flocks(k):
        for _ in opens(k):
            yield fcntl.flock(kept[-1], fcntl.LOCK_SH)

    def directories(k):
        while True:
            kept.append(os.scandir("."))
            yield next(kept[-1], None)

    def control(k):
        while True:
            kept.append(os.open(mount + "/.symphony/metrics", os.O_RDONLY))
            yield os.read(kept[-1], 1)

    def plain(k):
        for i in itertools.count():
            kept.append(os.open(f"{k}-{i}", os.O_CREAT | os.O_RDWR, 0o600))
            yield os.write(kept[-1], b"x")

    def versions(k):
        kv = sym.kv_create(f"{mine}/{k}.kv")
        while True:
            kv.write([1])
            reader = os.open(f"{k}.kv", os.O_RDONLY)
            kept.append(os.open(f"{k}.kv", os.O_PATH))
            kv.write([1])
            kept.append(os.open(f"{k}.kv", os.O_PATH))
            os.close(reader)
            kv.truncate(0)
            yield

    def in_threads(call, most):
        def attempt():
            try:
                call()
            except (OSError, sym.SymError) as error:
                failed.append(error)
        for i in itertools.count():
            if failed or i == most:
                time.sleep(0.05)
                raise failed[0] if failed else OSError(0, f"{most} threads in each process")
            threading.Thread(target=attempt, daemon=True).start()
            yield

    def waits(k):
        holder = os.open("a.kv", os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = os.open("a.kv", os.O_RDONLY)
        kept.extend([holder, other])
        return in_threads(lambda: fcntl.flock(other, fcntl.LOCK_EX), 900)

    def calls(k):
        return in_threads(lambda: sym.recv(), 990)

    def threads(k):
        while True:
            caller = threading.Thread(target=sym.tokenize, args=["a b c"])
            caller.start()
            yield caller.join()

    def watchers(k):
        return in_threads(lambda: sym.kv_pressure(), 990)

    def frames(k):
        return in_threads(lambda: sym.tokenize("a b c " * 40_000), 64)

    def texts(k):
        for i in itertools.count():
            text = f"{mount}/.symphony/text/{mine}/{k}-{i}.kv"
            kept.append(os.open(text, os.O_CREAT | os.O_WRONLY, 0o600))
            yield os.write(kept[-1], b"a" * 40)

    def handles(k):
        while True:
            yield kept.append(sym.kv_open(f"{mine}/a.kv"))

    def locks(k):
        for _ in handles(k):
            yield kept[-1].lock(shared=True)

    def claims(k):
        for i in itertools.count():
            yield kept.append(process.channel().run(claim_script(f"{mine}/{k}-{i}.kv", "r", 0o600, None)))

    def messages(k):
        while True:
            yield sym.send(os.getpid(), bytes(60_000))

    def topics(k):
        for i in itertools.count():
            yield sym.subscribe(f"{i:0250}")

    def connections(k):
        while True:
            here, there = os.pipe()
            if not os.fork():
                try:
                    sym.getpid()
                except (OSError, sym.SymError) as error:
                    os.write(there, str(error).encode())
                os.close(there)
                os.close(1)
                time.sleep(600)
                os._exit(0)
            os.close(there)
            said = os.read(here, 1000)
            os.close(here)
            if said:
                raise OSError(0, said.decode())
            yield

    def programs(k):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
            launcher.connect(socket_path + ".programs")
            for i in itertools.count():
                program = {"id": os.urandom(4).hex(), "name": "x" * 64, "pid": None, "parent": None, "limits": {}}
                launcher.send(json.dumps({"n": i, "do": "start", **program}).encode())
                answer = json.loads(launcher.recv(1 << 16))
                if "error" in answer:
                    kept.append(launcher.dup())
                    raise OSError(0, answer["error"])
                yield

    def busy(k):
        while True:
            yield os.stat("/")

    def log(k):
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(socket_path)
                connection.sendall(os.urandom(64))
            name = f"{mount}/{mine}/{k}.kv"
            with open(name, "wb") as image:
                image.write(b"SYMPHKV1" + bytes(5000))
            os.unlink(name)
            yield

    def work(case, seconds, k, out):
        os.setpgid(0, group)
        os.chdir("/" if case == "busy" else mount + "/" + mine)
        end_s, made, why = time.monotonic() + seconds, 0, "time"
        try:
            for _ in globals()[case](k):
                made += 1
                if time.monotonic() > end_s:
                    break
        except (OSError, sym.SymError) as error:
            why = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or repr(error)
        os.write(out, json.dumps([made, why]).encode())
        time.sleep(600)
        os._exit(0)

    def prepare():
        if not os.fork():
            sym.kv_mkdir(mine)
            with sym.kv_create(f"{mine}/a.kv") as kv:
                kv.write([1])
            os._exit(0)
        os.wait()

    print("ready", flush=True)
    for line in sys.stdin:
        case, seconds, processes = line.split()
        if case == "end":
            os.killpg(group, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
            end_s = time.monotonic() + 20
            while os.path.lexists(f"{mount}/{mine}") and time.monotonic() < end_s:  # also until its calls have ended
                shutil.rmtree(f"{mount}/{mine}", ignore_errors=True)
            print(json.dumps(sorted(os.listdir(mount))), flush=True)
            continue
        if case != "busy":
            prepare()
        children, pipes, group = [], [], 0
        for k in range(int(processes)):
            here, there = os.pipe()
            child = os.fork()
            if not child:
                work(case, float(seconds), k, there)
            os.close(there)
            group = group or child
            try:
                os.setpgid(child, group)
            except OSError as error:
                assert error.errno == errno.EACCES
            children.append(child)
            pipes.append(here)
        found = [json.loads(os.read(each, 10_000) or "null") for each in pipes]
        assert all(found), f"{case} has failed: see above"
        for each in pipes:
            os.close(each)
        print(json.dumps([sum(made for made, _ in found), found[0][1]]), flush=True)
"""
PREDS = """
    print("ready", flush=True)
    for line in sys.stdin:
        took = []
        with sym.kv_create() as kv:
            for _ in range(int(line)):
                began_s = time.perf_counter()
                sym.pred(kv, [1])
                took.append(time.perf_counter() - began_s)
                if kv.len() > 100:
                    kv.truncate(0)
        print(json.dumps(took), flush=True)
"""


class Told:
    """Program of a user that answers lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._line() == "ready"

    def begin(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def ask(self, line: str) -> Any:
        self.begin(line)
        return self.answer()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a program has failed: see above"
        return line.strip()


@contextmanager
def told(served: Daemon, uid: int, code: str, *arguments: object) -> Iterator[Told]:
    with running_as(uid, code, *arguments, served=served) as process:
        try:
            yield Told(process)
        finally:
            process.kill()


@contextmanager
def peak_of(served: Daemon) -> Iterator[list[int]]:
    """Yield a list whose one item becomes the daemon's peak memory within the block."""
    most, is_over = [memory_bytes(served)], threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            most[0] = max(most[0], memory_bytes(served))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        is_over.set()
        looking.join()
        most[0] = max(most[0], memory_bytes(served))


class Trial:
    """A daemon with its attacker and its victim."""

    def __init__(self, served: Daemon, effort: Effort, stack: ExitStack) -> None:
        self.served, self.effort = served, effort
        self.attacker = stack.enter_context(told(served, ATTACKER, HOARD, served.mount, served.socket))
        self.victim = stack.enter_context(told(served, VICTIM, PREDS))
        sym.connect(str(served.socket))
        self.victim.ask(str(effort.preds))
        self.calm_s = self._calm_s()

    def holdings(self) -> dict[str, Any]:
        """Return the daemon's account of the attacker's objects. Empty: the daemon is old, and has no such accounts."""
        users = sym.daemon_stat().get("users", ())
        return next((each for each in users if each["uid"] == ATTACKER), NOTHING)

    def _calm_s(self) -> float:
        """Return the percentile of the victim's pred() beside harmless programs, as many as the attacker has."""
        self.attacker.begin(f"busy {self.effort.seconds / 2} {self.effort.processes}")
        took = self.victim.ask(str(self.effort.preds))
        self.attacker.answer()
        self.attacker.ask("end 0 0")
        return percentile(took)

    def run(self, case: str) -> tuple[str, list[str]]:
        """Return a line of the table, and the failures."""
        for _ in range(TRIES):
            line, broken, doubtful = self._run(case)
            if broken or not doubtful:
                return line, broken
            print(f"{case}, once more: {doubtful}", file=sys.stderr)
        return line, [doubtful]

    def _run(self, case: str) -> tuple[str, list[str], str]:
        """Return a line of the table, the failures, and the failures that may be due to chance."""
        served, effort, broken = self.served, self.effort, []
        if not effort.is_quick:
            self.calm_s = self._calm_s()
        had, disk, log = memory_bytes(served), disk_bytes(served), served.log.stat().st_size
        with peak_of(served) as peak:
            self.attacker.begin(f"{case} {effort.seconds} {effort.processes}")
            meanwhile_s = percentile(self.victim.ask(str(effort.preds)))
            made, why = self.attacker.answer()
            holdings = self._counted(case, made)
            charged_bytes, quota_bytes = holdings["memory_bytes"], holdings["quota_memory"]
            held = memory_bytes(served)
        grown, disk = peak[0] - had, disk_bytes(served) - disk
        left = self.attacker.ask("end 0 0")
        freed = self._wait_for_end()
        after, log = memory_bytes(served) - had, served.log.stat().st_size - log
        if not served.serves():
            return case, ["the daemon is gone"], ""
        charged = holdings["holds"].get(CASES[case], 0)
        if case not in UNCOUNTED and charged < made * COUNTED_PART:
            broken.append(f"{charged} of {made} {case} are charged")
        if held - had > charged_bytes + SLACK_BYTES:
            broken.append(f"{made} {case} take {mib(held - had)}, and {mib(charged_bytes)} are charged")
        if grown > quota_bytes + SLACK_BYTES:
            broken.append(f"{case} take {mib(grown)} of {mib(quota_bytes)}")
        if disk > max(quota_bytes, holdings["used_bytes"]) + SLACK_BYTES:
            broken.append(f"{case} take {mib(disk)} of disk, and {mib(holdings['used_bytes'])} are charged")
        if log > LOG_BYTES:
            broken.append(f"{case} have the log grow by {mib(log)}")
        if not freed or left:
            broken.append(f"of {case}, {left or self.holdings()['holds']} do not come back")
        row = (case, f"{made:,}", mib(grown), mib(charged_bytes), mib(after), mib(disk), mib(log))
        times = f"{1e3 * self.calm_s:.1f}", f"{1e3 * meanwhile_s:.1f}"
        doubtful = ""
        if meanwhile_s > MOST * self.calm_s + effort.slack_s:
            doubtful = f"with {case} another user's calls take {1e3 * meanwhile_s:.0f} ms, not {1e3 * self.calm_s:.0f}"
        if after > max(SLACK_BYTES, grown // 2):  # a heap that has grown keeps space for the same number of objects
            doubtful = f"of {case}, {mib(after)} of memory do not come back"
        return shown((*row, *times, why[:100])), broken, doubtful

    def _counted(self, case: str, made: int) -> dict[str, Any]:
        """Return the attacker's holdings. The attacker's threads get some time for their first call."""
        end_s = time.monotonic() + 10
        while True:
            found = self.holdings()
            is_all = case in UNCOUNTED or found["holds"].get(CASES[case], 0) >= made * COUNTED_PART
            if is_all or time.monotonic() > end_s:
                return found
            time.sleep(0.05)

    def _wait_for_end(self) -> bool:
        """Wait until nothing is charged to the attacker. Return False after ten seconds."""
        end_s = time.monotonic() + 10
        while self.holdings()["memory_bytes"]:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)
        return True


def percentile(took: Sequence[float]) -> float:
    return statistics.quantiles(took, n=100, method="inclusive")[98]


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}M"


def shown(cells: Sequence[str]) -> str:
    *most, last = cells
    return f"{most[0]:12}" + " ".join(f"{each:>9}" for each in most[1:]) + f"  {last}"


def disk_bytes(served: Daemon) -> int:
    return sum(path.stat().st_blocks * 512 for path in served.state.rglob("*") if path.is_file())


@contextmanager
def small_memory() -> Iterator[Callable[[], None]]:
    """Limit the memory of processes started from now on to GROUP_BYTES, until the yielded function is called.

    If no control group of version 1 can be made, the processes have all of the machine's memory.
    """
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    above = Path("/sys/fs/cgroup/memory") / own.rpartition(":")[2].lstrip("/")
    group = above / f"hoard-{os.getpid()}"

    def leave() -> None:
        (above / "cgroup.procs").write_text(str(os.getpid()))

    try:
        group.mkdir()
    except OSError as error:
        print(f"the daemon has the machine's memory: {error}", file=sys.stderr)
        yield lambda: None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield leave
    finally:
        leave()
        group.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: the form that the suite runs")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is attacked")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases")
    asked = parser.parse_args()
    broken, table = [], []
    is_new = (asked.tree / "kvfs/pages/holdings.py").exists()
    memory = ("--quota-memory", QUICK_MEMORY if asked.quick else MEMORY) if is_new else ()
    for name, limits in {"quotas": (*QUOTAS, *memory), "defaults": ()}.items():
        with ExitStack() as stack:
            leave = stack.enter_context(nullcontext(lambda: None) if limits else small_memory())
            served = stack.enter_context(daemon("--kv-memory", "16M", *limits, tree=asked.tree))
            leave()
            trial = Trial(served, QUICK if asked.quick else FULL, stack)
            heads = (f"with {name}", "made", "memory", "charged", "after", "disk", "log", "p99 ms", "meanwhile")
            table.append(shown((*heads, "stopped by")))
            for case in asked.only:
                line, wrong = trial.run(case)
                table.append(line)
                print(line, file=sys.stderr, flush=True)
                broken += [f"with {name} {each}" for each in wrong]
            sym.close()
    result = verdict(f"{len(asked.only)} kinds are bounded, charged, and come back", broken)
    print(*table, sep="\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
