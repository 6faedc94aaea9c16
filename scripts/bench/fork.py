#!/usr/bin/env python3
"""How long a fork takes on the mount: `cp` with its process, and the copy_file_range(2) alone, at 1 MiB and 1 GiB.

Mounts a scratch instance of its own; its pages are memory that is committed when it is touched, so the GiB costs none.
Run as root (or where a user may mount) with the repository's interpreter: .venv/bin/python scripts/bench/fork.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
SIZES = {"1 MiB": 1, "1 GiB": 1024}
"""Pages of each file."""


def make_file_system(base: Path) -> FileSystem:
    facts = FakeFacts(head_dim=PAGE_BYTES // (2 * 2 * 2 * PAGE_ENTRIES * 4))
    store = FakeStore(facts, num_pages=sum(SIZES.values()) + 16)
    fs = FileSystem(PagePool(store), facts, base / "backing", os.getuid(), os.getgid())
    creds = Credentials(os.getuid(), os.getgid())
    for name, num_pages in SIZES.items():
        handle = fs.kv_create(creds, name)
        num_entries = num_pages * PAGE_ENTRIES
        commit_all(fs.reserve(handle, [1] * num_entries, range(num_entries)))
        fs.committed(handle)
        fs.kv_close(handle)
    return fs


def seconds_of_call(source_path: Path, target_path: Path) -> float:
    """The copy_file_range alone."""
    source, target = os.open(source_path, os.O_RDONLY), os.open(target_path, os.O_WRONLY | os.O_CREAT)
    size = os.fstat(source).st_size
    start = time.perf_counter()
    copied = os.copy_file_range(source, target, 1 << 40)
    taken = time.perf_counter() - start
    assert copied == size, f"{copied} of {size} bytes copied"
    os.close(source)
    os.close(target)
    return taken


def seconds_of_cp(source_path: Path, target_path: Path) -> float:
    """`cp`, from the start of its process to its end."""
    start = time.perf_counter()
    subprocess.run(["cp", source_path, target_path], check=True)
    return time.perf_counter() - start


def measure(mount: Path, num_turns: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds; sizes and ways take turns, so that a busy machine is busy for all."""
    ways: dict[str, Callable[[Path, Path], float]] = {"cp": seconds_of_cp, "copy_file_range": seconds_of_call}
    taken: dict[tuple[str, str], list[float]] = {(way, size): [] for way in ways for size in SIZES}
    for _ in range(num_turns):
        for (way, size), times in taken.items():
            times.append(ways[way](mount / size, mount / "fork"))
            (mount / "fork").unlink()
    return {way: {size: 1e3 * statistics.median(taken[way, size]) for size in SIZES} for way in ways}


def report(result: dict[str, dict[str, float]], num_turns: int) -> None:
    print(f"fork on the mount, ms, medians of {num_turns}")
    print(f"{'':18}" + "".join(f"{size:>10}" for size in SIZES))
    for way, by_size in result.items():
        print(f"{way:18}" + "".join(f"{milliseconds:10.2f}" for milliseconds in by_size.values()))


async def run(num_turns: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="symphony-bench-") as name:
        base = Path(name)
        fs = make_file_system(base)
        num_free = fs.pool.num_free
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[None]) -> None:
                await serve_mount(fs, base / "kv", allow_other=False, task_status=task_status)

            await nursery.start(serve)
            result = await trio.to_thread.run_sync(measure, base / "kv", num_turns)
            assert fs.pool.num_free == num_free, "a fork took pages"
            nursery.cancel_scope.cancel()
        fs.check()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Time forks on the mount.")
    parser.add_argument("--turns", type=int, default=21, help="measurements of each kind (default 21)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    sys.setswitchinterval(1e-4)  # as the daemon does
    result = trio.run(run, arguments.turns)
    if arguments.json:
        print(json.dumps({"unit": "ms", "turns": arguments.turns, "median": result}))
    else:
        report(result, arguments.turns)


if __name__ == "__main__":
    main()
