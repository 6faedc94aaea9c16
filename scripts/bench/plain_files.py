#!/usr/bin/env python3
"""Plain files on the mount: new bytes, syncs, first and later reads, overwrites, appends; beside another version.

    .venv/bin/python scripts/bench/plain_files.py [--before TREE] [--pairs 15] [--mib 32] [--calls 1000] [--quick]

Each version has a daemon with a state and a mount of its own, from its own interpreter where the tree has one. The two
take turns with slices of each kind of calls, and the first one changes from pair to pair. Figures are medians of the
pairs: the rate by the clock on the wall, and the processor time that the daemon takes for a MiB or a call. The last
three columns are ratios of before to now, above 1 where this version is better: medians of the pairs' ratios for both
clocks, and the least processor time of all pairs. Other work of the machine only adds to a time, so the least has
little of it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import xxhash

sys.path.append(str(Path(__file__).resolve().parent / "crowds"))

from attacked import ROOT, Attacked, attacked, processor

MIB = 1 << 20
CALL_BYTES = 4096
SLICES = 8
"""Of each kind of calls: daemons take turns with these, for the load of the machine changes within a second."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one MiB or one call: by the clock on the wall, and those of processors that the daemon took."""

    wall_s: float
    daemon_s: float


@dataclass
class Files:
    """Files of one daemon that go through all kinds of calls."""

    daemon: Attacked
    number: int
    mib: int
    calls: int
    costs: dict[str, Cost] = field(default_factory=dict)

    def run(self) -> Iterator[None]:
        """Make each kind of calls, and yield after each slice."""
        draws = random.Random(self.number)
        self._piece = memoryview(draws.randbytes(MIB))
        pieces = [MIB * number for number in range(self.mib)]
        offsets = [CALL_BYTES * block for block in draws.sample(range(self.mib * MIB // CALL_BYTES), self.calls)]
        with self._file(os.O_RDWR) as fd:
            yield from self._measured("new, MiB", pieces, self._write_piece, fd)
            yield from self._measured("sync", [0], self._sync, fd)
            for what in ("first read after a sync, MiB", "read again, MiB"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel must ask the daemon
                yield from self._measured(what, pieces, self._read_piece, fd)
            forget_all(fd)
            yield from self._measured("random 4 KiB reads", offsets, self._read, fd)
            for what in ("4 KiB overwrites after a sync", "4 KiB overwrites again"):
                yield from self._measured(what, offsets, self._overwrite, fd)
            yield from self._measured("overwrites, MiB", pieces, self._write_piece, fd)
        with self._file(os.O_RDWR) as fd:
            for offset in pieces:
                self._write_piece(fd, offset)
            os.fsync(fd)
            forget_all(fd)
            yield from self._measured("random 4 KiB reads, first after a sync", offsets, self._read, fd)
        with self._file(os.O_WRONLY | os.O_APPEND) as fd:
            yield from self._measured("4 KiB appends", offsets, self._append, fd)

    @contextmanager
    def _file(self, flags: int) -> Iterator[int]:
        path = self.daemon.mount / "plain"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        yield fd
        os.close(fd)
        path.unlink()

    def _measured(self, what: str, offsets: list[int], call: Callable[[int, int], None], fd: int) -> Iterator[None]:
        wall_s = daemon_s = 0.0
        size = -(-len(offsets) // SLICES)
        for first in range(0, len(offsets), size):
            began_s, taken_s = time.perf_counter(), processor_s(self.daemon.pid)
            for offset in offsets[first : first + size]:
                call(fd, offset)
            wall_s += time.perf_counter() - began_s
            daemon_s += processor_s(self.daemon.pid) - taken_s
            yield
        self.costs[what] = Cost(wall_s / len(offsets), daemon_s / len(offsets))

    def _write_piece(self, fd: int, offset: int) -> None:
        os.pwrite(fd, self._piece, offset)

    def _read_piece(self, fd: int, offset: int) -> None:
        assert os.pread(fd, MIB, offset) == self._piece

    def _sync(self, fd: int, _offset: int) -> None:
        os.fsync(fd)

    def _read(self, fd: int, offset: int) -> None:
        assert len(os.pread(fd, CALL_BYTES, offset)) == CALL_BYTES

    def _overwrite(self, fd: int, offset: int) -> None:
        os.pwrite(fd, self._piece[:CALL_BYTES], offset)

    def _append(self, fd: int, _offset: int) -> None:
        os.write(fd, self._piece[:CALL_BYTES])


def forget_all(fd: int) -> None:
    """Have the kernel ask the daemon for each page of a file, and read none ahead."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def processor_s(pid: int) -> float:
    """Processor time of a process, of threads that have ended, too: the clock that the kernel has for each process."""
    return time.clock_gettime((~pid << 3) | 2)


def hash_s(rounds: int = 200) -> float:
    """Processor time that the checksums of a MiB take at least, in extents, of bytes that no cache has."""
    data, extent = memoryview(os.urandom(64 * MIB)), 256 << 10
    began_s = time.thread_time()
    for _ in range(rounds // 64 + 1):
        for start in range(0, len(data), extent):
            xxhash.xxh3_64_intdigest(data[start : start + extent])
    return (time.thread_time() - began_s) / (rounds // 64 + 1) / 64


def take_turns(daemons: list[Attacked], options: Namespace) -> Iterator[list[Files]]:
    """A pair of files in each round, that take turns with slices of their calls. The first pair opens files, and fills
    caches: it does not count.
    """
    for number in range(options.pairs + 1):
        pair = [Files(daemon, number, options.mib, options.calls) for daemon in daemons]
        runs = [files.run() for files in (pair if number % 2 else reversed(pair))]
        for _ in zip(*runs, strict=True):
            pass
        if number:
            yield pair


def show(pairs: list[list[Files]]) -> None:
    names = ["now", "before"][: len(pairs[0])]
    heads = [f"{unit} {name}" for unit in ("a second,", "daemon us,") for name in names]
    ratios = ["wall", "daemon", "least"] if len(names) == 2 else []
    print(
        f"{f'medians of {len(pairs)}':42}"
        + "".join(f"{head:>18}" for head in heads)
        + "".join(map("{:>8}".format, ratios))
    )
    for what in pairs[0][0].costs:
        costs = [[files.costs[what] for files in pair] for pair in pairs]
        sides = list(zip(*costs, strict=True))
        cells = [f"{1 / median(each.wall_s for each in side):18.0f}" for side in sides]
        cells += [f"{1e6 * median(each.daemon_s for each in side):18.1f}" for side in sides]
        if ratios:
            least_s = [min(each.daemon_s for each in side) for side in sides]
            found = (
                median(before.wall_s / now.wall_s for now, before in costs),
                median(before.daemon_s / now.daemon_s for now, before in costs),
                least_s[1] / least_s[0],
            )
            cells += map("{:8.2f}".format, found)
        print(f"  {what:40}{''.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout that is measured")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another one, in turns with it")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--mib", type=int, default=32, help="of each file")
    parser.add_argument("--calls", type=int, default=1000, help="of 4 KiB")
    parser.add_argument("--quick", action="store_true", help="one turn with files of 4 MiB: whether it works")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.mib, options.calls = 1, 4, 100
    with ExitStack() as stack:
        trees = [options.tree, *([options.before] if options.before else [])]
        daemons = [stack.enter_context(attacked(Namespace(tree=tree, model="tiny"))) for tree in trees]
        load = os.getloadavg()[0]
        pairs = list(take_turns(daemons, options))
        print(f"{processor()}; load {load:.1f} to {os.getloadavg()[0]:.1f}")
        print(f"a MiB is summed in {1e6 * hash_s():.0f} us")
        show(pairs)


if __name__ == "__main__":
    main()
