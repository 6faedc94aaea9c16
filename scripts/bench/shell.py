#!/usr/bin/env python3
# ruff: noqa: PTH116 - the benchmark measures these very calls
"""Measure commands of a shell over many small files: on the mount, on a minimal FUSE program in C, and on the disk.

    .venv/bin/python scripts/bench/shell.py [--before TREE] [--files 5000] [--rounds 5] [--only "ls -l,rm -r"]
        [--disk DIR] [--save NAME] [--quick] [--json]

The C program (passthrough.c) passes each request to a directory on the same disk, and lets the kernel keep nothing. All
sides take turns. Figures are microseconds of wall-clock time for one file. Notes have the number of requests of the
kernel for one file, and the processor time of the daemon. Run as root. The C program has a descriptor for each file, so
--files is limited by RLIMIT_NOFILE (ulimit -n): `cp -r` needs two for each file.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT, Row, arguments, chosen, processor, processor_s, rotated, seconds_of, served, show_rows

TRACING = Path("/sys/kernel/tracing")
DIRECTORIES = 10
TEXT = b"A line of a small file, as programs and their sources have them.\n" * 20


@dataclass
class Side:
    """A place with files, and the process that answers the kernel's requests for it."""

    name: str
    where: Path
    pid: int = 0
    us: dict[str, list[float]] = field(default_factory=dict)
    """Wall-clock time for one file, by command and round."""
    own_us: dict[str, list[float]] = field(default_factory=dict)
    """Processor time of the process for one file."""
    requests: dict[str, list[float]] = field(default_factory=dict)
    """Number of requests of the kernel for one file."""


def create(where: Path, files: int) -> None:
    for number in range(DIRECTORIES):
        (where / f"tree/{number}").mkdir(parents=True)
    for number in range(files):
        descriptor = os.open(f"{where}/tree/{number % DIRECTORIES}/{number}.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(descriptor, TEXT)
        os.close(descriptor)


def stat(where: Path, files: int) -> None:
    for number in range(files):
        os.stat(f"{where}/tree/{number % DIRECTORIES}/{number}.txt")


def shell(line: str) -> Callable[[Path, int], None]:
    def run(where: Path, _files: int) -> None:
        subprocess.run(["sh", "-c", line], cwd=where, stdout=subprocess.DEVNULL, check=True)

    return run


COMMANDS: dict[str, Callable[[Path, int], None]] = {
    "create": create,
    "ls -l": shell("ls -lR tree"),
    "ls -l again": shell("ls -lR tree"),
    "stat": stat,
    "find": shell("find tree -newer tree/0"),
    "du": shell("du -s tree"),
    "grep -r": shell("grep -rc small tree"),
    "tar": shell("tar cf - tree | cat"),
    "cp -r": shell("cp -r tree copy"),
    "diff -r": shell("diff -r tree copy"),
    "rm -r": shell("rm -r copy"),
    "rsync -a": shell("rsync -a tree/ other"),
}
MAKERS = {"create", "cp -r"}
"""Commands that make what the others read or remove. They always run."""


@contextmanager
def tracing() -> Iterator[None]:
    """Mount the kernel's tracefs for the block, unless it is mounted."""
    is_missing = not (TRACING / "events/fuse").exists()
    if is_missing:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACING], check=True)
    try:
        yield
    finally:
        if is_missing:
            subprocess.run(["umount", TRACING], check=True)


@contextmanager
def counted(where: Path) -> Iterator[list[int]]:
    """Count the requests that the kernel sends about a mount during the block, by the kernel's tracepoint."""
    found = [0]
    instance = TRACING / "instances" / f"symphony-bench-{os.getpid()}"
    instance.mkdir()
    try:
        event = instance / "events/fuse/fuse_request_send"
        (event / "filter").write_text(f"connection == {os.minor(where.stat().st_dev)}")
        (event / "enable").write_text("1")
        yield found
        (event / "enable").write_text("0")
        for each in instance.glob("per_cpu/cpu*/stats"):
            lines = dict(line.split(": ") for line in each.read_text().splitlines())
            found[0] += int(lines["entries"]) + int(lines["overrun"])
    finally:
        instance.rmdir()


def measure(side: Side, command: str, files: int) -> None:
    own_s = processor_s(side.pid) if side.pid else 0.0
    with counted(side.where) if side.pid else nullcontext([0]) as requests:
        took_s = seconds_of(lambda: COMMANDS[command](side.where, files))
    if side.pid:
        side.requests.setdefault(command, []).append(requests[0] / files)
        side.own_us.setdefault(command, []).append(1e6 * (processor_s(side.pid) - own_s) / files)
    side.us.setdefault(command, []).append(1e6 * took_s / files)


@contextmanager
def passed_through(disk: Path) -> Iterator[Side]:
    """Run the C program before a directory on the disk."""
    with tempfile.TemporaryDirectory(prefix="shell-", dir=disk) as name:
        place = Path(name)
        for each in ("directory", "mount"):
            (place / each).mkdir()
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], stdout=subprocess.PIPE, check=True)
        source = Path(__file__).with_name("passthrough.c")
        subprocess.run(["cc", "-O2", source, *flags.stdout.decode().split(), "-o", place / "passthrough"], check=True)
        program = subprocess.Popen([place / "passthrough", place / "directory", place / "mount"])
        try:
            while not os.path.ismount(place / "mount"):
                if program.poll() is not None:
                    raise SystemExit("passthrough.c did not start: see above")
                time.sleep(0.01)
            yield Side("C", place / "mount", program.pid)
        finally:
            program.terminate()
            program.wait(30)


def run(args: argparse.Namespace) -> list[Row]:
    shown = list(COMMANDS) if args.only == "all" else chosen(args.only, COMMANDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.enter_context(tracing())
        sides = [stack.enter_context(passed_through(args.disk))]
        trees = {"ours": args.tree, **({"before": args.before} if args.before else {})}
        for name, tree in trees.items():
            daemon = stack.enter_context(served("tiny", tree=tree))
            (daemon.mount / "place").mkdir()
            sides.append(Side(name, daemon.mount / "place", daemon.pid))
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="shell-", dir=args.disk))
        sides.append(Side("disk", Path(place)))
        for number in range(args.rounds + 1):
            for command in (command for command in COMMANDS if command in {*shown, *MAKERS}):
                for side in rotated(sides, number):
                    measure(side, command, args.files)
            for side in sides:
                for each in side.where.iterdir():
                    shutil.rmtree(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return [row for command in shown for row in rows_of(command, sides)]


def rows_of(command: str, sides: list[Side]) -> Iterator[Row]:
    """Yield a row for each peer: our figure beside the peer's. The first round does not count."""
    ours = next(side for side in sides if side.name == "ours")
    for peer in sides:
        if peer is ours:
            continue
        notes = list[str]()
        for side in (ours, peer):
            if side.pid:
                own, requests = (statistics.median(each[command][1:]) for each in (side.own_us, side.requests))
                notes.append(f"{side.name} {requests:.1f} requests, processor {own:.1f} us")
        what = f"{command} beside {peer.name}"
        yield Row(what, "us", ours.us[command][1:], peer.name, peer.us[command][1:], note="; ".join(notes))


def main() -> None:
    sizes = {"rounds": 5, "files": (5000, "of 1,300 bytes"), "only": "all"}
    places = {"tree": ROOT, "before": Path, "disk": (Path(tempfile.gettempdir()), "directory for the disk's own side")}
    args = arguments(__doc__, **places, **sizes, save=str, quick=False, json=False).parse_args()
    if args.quick:
        args.rounds, args.files = 1, 100
    show_rows(run(args), f"{processor()}; {args.files:,} files", args)


if __name__ == "__main__":
    main()
