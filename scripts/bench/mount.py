#!/usr/bin/env python3
# ruff: noqa: PTH108, PTH116, PTH208 - the system calls themselves are what is measured
"""The mount beside a minimal libfuse program in C and tmpfs: names, attributes, bytes, forks; what finds cost a pred().

    .venv/bin/python scripts/bench/mount.py [--turns 5] [--pred] [--json]

All take turns in one run, once with client and server on one CPU and once wherever the kernel puts them; medians. The
scratch mount is served by a process of its own over memory, as is the C program (`peers/minimal_fuse.c`, compiled here
with gcc). Needs root, or a user who may mount. `--pred` starts a daemon and measures pred() alone and beside four
`find`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from kvfs.fs import FileSystem  # noqa: E402 - the path comes first
from kvfs.mount.session import serve_mount  # noqa: E402
from kvfs.names.tree import Credentials  # noqa: E402
from kvfs.pages.pool import PagePool  # noqa: E402
from libsym.abi import PAGE_ENTRIES  # noqa: E402
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all  # noqa: E402

PAGE_BYTES = 1 << 20
IMAGE_PAGES = 256
FORK_PAGES = 1024
NUM_PAGES = FORK_PAGES + 3 * IMAGE_PAGES
PIECE = 1 << 20
NUM_NAMES = 10_000


# The server


def make_file_system(backing: Path) -> FileSystem:
    facts = FakeFacts(head_dim=PAGE_BYTES // (2 * 2 * 2 * PAGE_ENTRIES * 4))
    store = FakeStore(facts, NUM_PAGES)
    store.pages[:] = 0  # touched: a daemon's pages were used before, and first use is what its machine's memory costs
    fs = FileSystem(PagePool(store), facts, backing, os.getuid(), os.getgid())
    creds = Credentials(os.getuid(), os.getgid())
    for name, num_pages in {"image": IMAGE_PAGES, "large": FORK_PAGES}.items():
        handle = fs.kv_create(creds, name)
        num_entries = num_pages * PAGE_ENTRIES
        commit_all(fs.reserve(handle, [1] * num_entries, range(num_entries)))
        fs.committed(handle)
        fs.kv_close(handle)
    return fs


async def serve(base: Path, backing: Path) -> None:
    """Until SIGTERM."""
    fs = make_file_system(backing)
    async with trio.open_nursery() as nursery:

        async def mount(task_status: trio.TaskStatus[None]) -> None:
            await serve_mount(fs, base / "kv", allow_other=False, task_status=task_status)

        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await nursery.start(mount)
            print("mounted", flush=True)
            await anext(signals)
        nursery.cancel_scope.cancel()
    fs.check()


@contextmanager
def our_mount(base: Path, backing: Path) -> Iterator[tuple[Path, int]]:
    """Where it is, and the server's pid; plain files' bytes are in `backing`: in memory, as the C program's are."""
    command = [sys.executable, __file__, "--serve", base, backing]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"mounted\n"
            yield base / "kv", server.pid
        finally:
            server.terminate()
    assert server.returncode == 0


@contextmanager
def minimal_mount(base: Path) -> Iterator[tuple[Path, int]]:
    where, program = base / "minimal", base / "minimal_fuse"
    where.mkdir()
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=True)
    source = REPOSITORY / "scripts/bench/peers/minimal_fuse.c"
    subprocess.run(["gcc", "-O2", "-o", program, source, *flags.stdout.split()], check=True)
    with subprocess.Popen([program, "-f", where]) as server:
        try:
            while not os.path.ismount(where):
                assert server.poll() is None, "minimal_fuse ended"
                time.sleep(0.01)
            yield where, server.pid
        finally:
            server.terminate()


# What is measured: each gives seconds for one of it


def stat(where: Path, count: int) -> float:
    path = str(where / "file")
    began = time.perf_counter()
    for _ in range(count):
        os.stat(path)
    return (time.perf_counter() - began) / count


def open_read_close(where: Path, count: int) -> float:
    path = str(where / "file")
    began = time.perf_counter()
    for _ in range(count):
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)
    return (time.perf_counter() - began) / count


def create(where: Path, count: int) -> float:
    directory = f"{where}/"
    began = time.perf_counter()
    for i in range(count):
        os.close(os.open(f"{directory}new{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    taken = (time.perf_counter() - began) / count
    for i in range(count):
        os.unlink(f"{directory}new{i}")
    return taken


def list_names(where: Path, _count: int) -> float:
    began = time.perf_counter()
    found = os.listdir(where)
    taken = time.perf_counter() - began
    assert len(found) >= NUM_NAMES
    return taken


def read_image(where: Path, _count: int) -> float:
    """Through the page cache, which has nothing of it."""
    fd = os.open(where / "image", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    piece = bytearray(PIECE)
    began = time.perf_counter()
    while os.readv(fd, [piece]):
        pass
    taken = time.perf_counter() - began
    os.close(fd)
    return taken


def write_image(image: memoryview, where: Path, _count: int) -> float:
    """A file of these bytes, to the end of its close: on the mount it is a KV file then."""
    began = time.perf_counter()
    fd = os.open(where / "copy", os.O_CREAT | os.O_WRONLY, 0o644)
    for start in range(0, len(image), PIECE):
        os.write(fd, image[start : start + PIECE])
    os.close(fd)
    taken = time.perf_counter() - began
    os.unlink(where / "copy")
    return taken


def write_plain(image: memoryview, where: Path, count: int) -> float:
    """The same bytes without an image's beginning: they stay a plain file."""
    return write_image(image[PIECE:], where, count)


def fork(where: Path, _count: int) -> float:
    source, target = os.open(where / "large", os.O_RDONLY), os.open(where / "fork", os.O_CREAT | os.O_WRONLY)
    began = time.perf_counter()
    copied = os.copy_file_range(source, target, 1 << 40)
    taken = time.perf_counter() - began
    assert copied > FORK_PAGES * PAGE_BYTES
    os.close(source)
    os.close(target)
    os.unlink(where / "fork")
    return taken


# Turns


@contextmanager
def pinned(pids: list[int], *, to_one: bool) -> Iterator[None]:
    """This process and the servers, on the last CPU; or anywhere."""
    everywhere = os.sched_getaffinity(0)
    chosen = {max(everywhere)} if to_one else everywhere
    for pid in (0, *pids):
        _pin(pid, chosen)
    try:
        yield
    finally:
        for pid in (0, *pids):
            _pin(pid, everywhere)


def _pin(pid: int, cpus: set[int]) -> None:
    for thread in Path(f"/proc/{pid or 'self'}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus)


def prepare(places: dict[str, Path]) -> memoryview:
    """The same files everywhere; the image's bytes come back."""
    image = (places["mount"] / "image").read_bytes()
    for name, where in places.items():
        if name != "mount":
            (where / "image").write_bytes(image)
        (where / "file").write_bytes(bytes(1000))
        for i in range(NUM_NAMES):
            os.close(os.open(where / f"name{i}", os.O_CREAT | os.O_WRONLY, 0o644))
    return memoryview(image)


def measure(places: dict[str, Path], image: memoryview, turns: int) -> dict[str, dict[str, float]]:
    """Seconds, medians, by what and where."""
    megabytes = len(image) / 1e6
    kinds: dict[str, tuple[Callable[[Path, int], float], int]] = {
        "stat": (stat, 3000),
        "open+read+close": (open_read_close, 1500),
        "create+close": (create, 1000),
        f"list {NUM_NAMES} names": (list_names, 1),
        f"read an image of {megabytes:.0f} MB": (read_image, 1),
        f"write an image of {megabytes:.0f} MB": (functools.partial(write_image, image), 1),
        f"write {megabytes - 1:.0f} MB that are none": (functools.partial(write_plain, image), 1),
    }
    result: dict[str, dict[str, float]] = {}
    for kind, (function, count) in kinds.items():
        taken: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(1 + turns):
            for name, where in places.items():
                taken[name].append(function(where, count))
        # Without the first turn: memory that was never used before costs what the machine below takes to give it.
        result[kind] = {name: statistics.median(times[1:]) for name, times in taken.items()}
    result["fork of 1 GiB"] = {"mount": statistics.median(fork(places["mount"], 1) for _ in range(turns))}
    return result


def run(turns: int) -> dict[str, dict[str, dict[str, float]]]:
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="symphony-bench-")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="symphony-bench-", dir="/dev/shm")))
        ours, our_pid = stack.enter_context(our_mount(base, memory / "backing"))
        minimal, minimal_pid = stack.enter_context(minimal_mount(base))
        places = {"mount": ours, "C": minimal, "tmpfs": memory}
        image = prepare(places)
        found = {}
        for name, to_one in (("one CPU", True), ("any CPU", False)):
            with pinned([our_pid, minimal_pid], to_one=to_one):
                found[name] = measure(places, image, turns)
        return found


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    for pinning, kinds in found.items():
        print(f"{pinning:32}{'mount':>10}{'C':>10}{'tmpfs':>10}{'mount : C':>12}")
        for kind, taken in kinds.items():
            cells = [_shown(kind, taken.get(name)) for name in ("mount", "C", "tmpfs")]
            ratio = f"{taken['C'] / taken['mount']:12.2f}" if "C" in taken else ""
            print(f"  {kind:30}" + "".join(f"{cell:>10}" for cell in cells) + ratio)


def _shown(kind: str, seconds: float | None) -> str:
    if seconds is None:
        return ""
    if kind.endswith("GiB"):
        return f"{1e3 * seconds:.2f} ms"
    if "MB" in kind:
        megabytes = float(kind.rpartition(" MB")[0].rpartition(" ")[2])
        return f"{megabytes / 1e3 / seconds:.2f} GB/s"
    return f"{1 / seconds:.0f}/s"


# pred() beside a storm

_PREDS = """
import json, sys, time
import libsym as sym
kv = sym.kv_create()
sym.pred(kv, sym.tokenize("The file system answers"))
times = []
for i in range(int(sys.argv[1])):
    began = time.perf_counter()
    sym.pred(kv, [5 + i % 50])
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


def storm_of_finds(model: str | None, count: int, turns: int, num_finds: int = 4) -> dict[str, list[float]]:
    """Milliseconds of pred(), median and p99, alone and beside `find` processes over a tree of 2,000 names."""
    with tempfile.TemporaryDirectory(prefix="symphony-bench-") as name:
        base = Path(name)
        environment = os.environ | {"SYMPHONY_SOCKET": str(base / "socket"), "PYTHONPATH": str(REPOSITORY)}
        options = ["--mount", base / "kv", "--state", base / "state", *(["--model", model] if model else [])]
        command = [sys.executable, "-m", "symphony", "serve", *options]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                print(daemon.stdout.readline().strip(), file=sys.stderr)
                for i in range(20):
                    (base / f"kv/d{i}").mkdir()
                    for j in range(100):
                        (base / f"kv/d{i}/f{j}").touch()
                return _storm(base / "kv", environment, count, turns, num_finds)
            finally:
                daemon.send_signal(signal.SIGTERM)


def _storm(mount: Path, environment: dict[str, str], count: int, turns: int, num_finds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"alone": [], f"beside {num_finds} finds": []}
    find = ["sh", "-c", f"while :; do find {mount} -printf '%s\\n' > /dev/null; done"]
    for _ in range(turns):
        for name, taken in times.items():
            finds = (
                [] if name == "alone" else [subprocess.Popen(find, start_new_session=True) for _ in range(num_finds)]
            )
            try:
                command = [sys.executable, "-c", _PREDS, str(count)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                taken.extend(json.loads(done.stdout))
            finally:
                for process in finds:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    return {name: [1e3 * value for value in _median_and_p99(taken)] for name, taken in times.items()}


def _median_and_p99(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the mount with a minimal libfuse program in C and tmpfs.")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each kind (default 5)")
    parser.add_argument("--pred", action="store_true", help="measure only pred(), alone and beside four `find`")
    parser.add_argument("--preds", type=int, default=500, help="calls of pred() a turn (default 500)")
    parser.add_argument("--model", help="the model of --pred (default: the daemon's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object (seconds) instead of a table")
    parser.add_argument("--serve", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)  # as the daemon does
    if options.serve:
        trio.run(serve, *options.serve)
    elif options.pred:
        storm = storm_of_finds(options.model, options.preds, options.turns)
        print(json.dumps(storm) if options.json else "pred(), ms: median and p99")
        if not options.json:
            for name, (median, p99) in storm.items():
                print(f"  {name:20}{median:8.2f}{p99:8.2f}")
    else:
        found = run(options.turns)
        print(json.dumps(found)) if options.json else show(found)


if __name__ == "__main__":
    main()
