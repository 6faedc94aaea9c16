#!/usr/bin/env python3
# ruff: noqa: PTH108, PTH116, PTH208 - the benchmark measures these very calls
"""Measure calls on the mount: names, plain files, images, forks, commands of a shell. With --before, two versions take
turns.

    .venv/bin/python scripts/bench/mount.py [--before TREE] [--rounds 15] [--mib 32] [--calls 1000] [--save NAME]
        [--quick] [--json]
    .venv/bin/python scripts/bench/mount.py --pred [--model smollm2]    # pred() beside four `find` over 2,000 names

Each version has a daemon with its own state and mount. The daemons take turns with slices of each kind of call. The
order of the daemons changes in each round. Figures are microseconds of wall-clock time for one call or one MiB, beside
those of the earlier version. A note has the processor time of the daemons. Run as root, or as a user who may mount.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness import ROOT, Daemon, Row, arguments, in_turns, processor, processor_s, quantile, served, show_rows

MIB = 1 << 20
CALL_BYTES = 4096
SLICES = 8
"""Slices of each kind of call. Daemons run slices in turns, since the machine's load changes within a second."""
KV_FILE = """
import libsym as sym
with sym.kv_create() as kv:
    sym.kv_write(kv, [1] * 257)
    sym.kv_extract(kv, [(1, None)] * 64, "large.kv", rebase=False).close()
    sym.kv_fork(kv, "small.kv").close()
print("made", flush=True)
"""
PREDS = """
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


@dataclass
class Calls:
    """A round of all kinds of calls on the mount of one daemon."""

    daemon: Daemon
    number: int
    args: argparse.Namespace
    wall_us: dict[str, float] = field(default_factory=dict)
    """Wall-clock time of one call or one MiB, by kind of call."""
    daemon_us: dict[str, float] = field(default_factory=dict)
    """Processor time of the daemon for one call or one MiB, by kind of call."""

    def run(self) -> Iterator[None]:
        """Make all kinds of calls, and yield after each slice."""
        yield from self._names()
        yield from self._plain()
        yield from self._images()
        yield from self._shell()

    def _measured(self, what: str, each: Sequence[int], call: Callable[[int], object]) -> Iterator[None]:
        wall_s = daemon_s = 0.0
        size = -(-len(each) // SLICES)
        for first in range(0, len(each), size):
            began_s, taken_s = time.perf_counter(), processor_s(self.daemon.pid)
            for one in each[first : first + size]:
                call(one)
            wall_s += time.perf_counter() - began_s
            daemon_s += processor_s(self.daemon.pid) - taken_s
            yield
        self.wall_us[what], self.daemon_us[what] = 1e6 * wall_s / len(each), 1e6 * daemon_s / len(each)

    def _names(self) -> Iterator[None]:
        where, calls = self.daemon.mount / "names", range(self.args.calls)
        where.mkdir()

        def create(number: int) -> None:
            os.close(os.open(f"{where}/{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

        def read(number: int) -> None:
            descriptor = os.open(f"{where}/{number}", os.O_RDONLY)
            os.read(descriptor, CALL_BYTES)
            os.close(descriptor)

        yield from self._measured("create and close", calls, create)
        yield from self._measured("stat", calls, lambda number: os.stat(f"{where}/{number}"))
        yield from self._measured("open, read, close", calls, read)
        yield from self._measured(f"list {len(calls):,} names", range(SLICES), lambda _: os.listdir(where))
        yield from self._measured("unlink", calls, lambda number: os.unlink(f"{where}/{number}"))
        where.rmdir()

    def _plain(self) -> Iterator[None]:
        draws = random.Random(self.number)
        piece = memoryview(draws.randbytes(MIB))
        pieces = [MIB * number for number in range(self.args.mib)]
        offsets = [CALL_BYTES * block for block in draws.sample(range(len(pieces) * 256), self.args.calls)]

        def read_piece(offset: int) -> None:
            assert os.pread(descriptor, MIB, offset) == piece

        def write(offset: int) -> None:
            os.pwrite(descriptor, piece[:CALL_BYTES], offset)

        with self._file(os.O_RDWR) as descriptor:
            yield from self._measured("new, MiB", pieces, lambda offset: os.pwrite(descriptor, piece, offset))
            yield from self._measured("sync", [0], lambda _: os.fsync(descriptor))
            for what in ("first read after a sync, MiB", "read again, MiB"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel must ask the daemon
                yield from self._measured(what, pieces, read_piece)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
            read = partial(os.pread, descriptor, CALL_BYTES)
            yield from self._measured("random 4 KiB reads", offsets, read)
            for what in ("4 KiB overwrites after a sync", "4 KiB overwrites again"):
                yield from self._measured(what, offsets, write)
            yield from self._measured("overwrites, MiB", pieces, lambda offset: os.pwrite(descriptor, piece, offset))
        with self._file(os.O_WRONLY | os.O_APPEND) as descriptor:
            append = piece[:CALL_BYTES]
            yield from self._measured("4 KiB appends", offsets, lambda _: os.write(descriptor, append))

    @contextmanager
    def _file(self, flags: int) -> Iterator[int]:
        path = self.daemon.mount / "plain"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        yield descriptor
        os.close(descriptor)
        path.unlink()

    def _images(self) -> Iterator[None]:
        image = self.daemon.mount / "large.kv"
        data = image.read_bytes()

        def copy(number: int) -> None:
            """Write the image's bytes to a new plain file, which becomes a KV file at its close."""
            (self.daemon.mount / f"copy{number}.kv").write_bytes(data)

        def read(_number: int) -> None:
            descriptor = os.open(image, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.read(descriptor, MIB):
                pass
            os.close(descriptor)

        def fork(number: int) -> None:
            self._fork("large.kv", f"fork{number}.kv")

        size = f"{len(data) / 1e6:.1f} MB"
        yield from self._measured(f"write an image of {size}", range(SLICES), copy)
        yield from self._measured(f"read an image of {size}", range(SLICES), read)
        yield from self._measured("fork of 16,384 entries", range(SLICES), fork)
        for path in (*self.daemon.mount.glob("copy*.kv"), *self.daemon.mount.glob("fork*.kv")):
            path.unlink()

    def _fork(self, source: str, target: str) -> None:
        """Copy a file as `cp` does, which makes a fork."""
        descriptor = os.open(self.daemon.mount / source, os.O_RDONLY)
        copy = os.open(self.daemon.mount / target, os.O_CREAT | os.O_WRONLY)
        while os.copy_file_range(descriptor, copy, 1 << 40):
            pass
        os.close(descriptor)
        os.close(copy)

    def _shell(self) -> Iterator[None]:
        """Run commands over a directory of forks."""
        where, forks = self.daemon.mount / "forks", f"{self.args.calls:,} forks"
        where.mkdir()
        for number in range(self.args.calls):
            self._fork("small.kv", f"forks/{number}.kv")

        def run(what: str, *command: str) -> Iterator[None]:
            def call(_number: int) -> None:
                subprocess.run([*command, where], stdout=subprocess.DEVNULL, check=True)

            return self._measured(f"{what}, {forks}", [0], call)

        yield from run("ls -l", "ls", "-l")
        yield from run("ls -l again", "ls", "-l")
        yield from run("du", "du", "-s")
        yield from run("rm -r", "rm", "-r")


def compare(args: argparse.Namespace) -> list[Row]:
    with ExitStack() as stack:
        trees = [args.tree, *([args.before] if args.before else [])]
        daemons = [stack.enter_context(served("tiny", tree=tree)) for tree in trees]
        for daemon in daemons:
            assert daemon.program(KV_FILE).communicate()[0] == "made\n"
        rounds = []
        for number in range(args.rounds + 1):
            sides = [Calls(daemon, number, args) for daemon in daemons]
            for _ in zip(*(each.run() for each in (sides if number % 2 else sides[::-1])), strict=True):
                pass
            rounds.append(sides)
    rows = []
    for what in rounds[0][0].wall_us:
        wall_us, daemon_us = (
            [[getattr(side, name)[what] for side in each] for each in zip(*rounds[1:], strict=True)]
            for name in ("wall_us", "daemon_us")
        )
        took = [f"{statistics.median(each):.1f} us" for each in daemon_us]
        note = f"the daemon's processor time {took[0]}{f', before {took[1]}' if args.before else ''}"
        peers = wall_us[1] if args.before else ()
        rows.append(Row(what, "us", wall_us[0], "before", peers, note=note))
    return rows


def pred_beside_finds(args: argparse.Namespace) -> list[Row]:
    """Measure pred(), alone and while four `find` read a tree of 2,000 names."""
    with served(args.model) as daemon:
        for i in range(20):
            (daemon.mount / f"d{i}").mkdir()
            for j in range(100):
                (daemon.mount / f"d{i}/f{j}").touch()
        found = in_turns({str(num): partial(preds_ms, daemon, args.calls, num) for num in (0, 4)}, args.rounds, warm=0)
    rows = []
    for share in (0.5, 0.99):
        alone, beside = ([quantile(turn, share) for turn in found[num]] for num in ("0", "4"))
        rows.append(Row(f"pred() beside 4 finds, p{100 * share:.0f}", "ms", beside, "alone", alone))
    return rows


def preds_ms(daemon: Daemon, count: int, num_finds: int) -> list[float]:
    find = ["sh", "-c", f"while :; do find {daemon.mount} -printf '%s\\n' > /dev/null; done"]
    finds = [subprocess.Popen(find, start_new_session=True) for _ in range(num_finds)]
    try:
        return [1e3 * took_s for took_s in json.loads(daemon.program(PREDS, count).communicate()[0])]
    finally:
        for process in finds:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    sizes = {"rounds": 15, "mib": (32, "of each file"), "calls": (1000, "of 4 KiB, of names, or of pred()")}
    kinds = {"model": "smollm2", "pred": (False, "measure only pred(), alone and beside four `find`"), "save": str}
    args = arguments(__doc__, tree=ROOT, before=Path, **sizes, **kinds, quick=False, json=False).parse_args()
    if args.quick:
        args.rounds, args.mib, args.calls = 1, 4, 100
    show_rows(pred_beside_finds(args) if args.pred else compare(args), processor(), args)


if __name__ == "__main__":
    main()
