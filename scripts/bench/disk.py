#!/usr/bin/env python3
"""Measure costs and savings of KV files on disk, in turns with plain programs and prefills.

    .venv/bin/python scripts/bench/disk.py [--only PART,...] [--model smollm2] [--precision bf16] [--size 1G]
        [--state DIR] [--rounds 5] [--save NAME] [--quick] [--json]

sync      kv_sync of a thousand tokens, and rates of a large file: kv_sync, and kv_open after a restart
history   a history of 7,000 tokens after a restart and from disk, beside its prefill
small     files a second of 64 threads: forks and new files, synced or not, beside plain files
restart   100,000 files: forks, kv_sync(), and the start of a daemon until `ls` and `stat` answer
decoding  tokens a second beside a program that writes, syncs or swaps, and beside plain writes and reads outside
swaps     swap-out and swap-in of --size bytes by the storage in this process, without a daemon
image     reading the image of a cold file through the mount

The daemons have temporary states below --state. The peers are plain programs on the same file system: O_DIRECT, pieces
of 8 MiB, fdatasync. A ratio is our figure divided by the peer's. Above 1, our rate is higher, or our time is longer.
The last lines say how long the daemons' trio thread was held.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from disk_rates import plain_append, plain_read, plain_write, swap_rates
from harness import (
    Daemon,
    Row,
    arguments,
    beside,
    chosen,
    connected,
    in_turns,
    processor,
    quantile,
    rotated,
    seconds_of,
    served,
    show_rows,
)

import libsym as sym
from kvfs.base.sizes import parse_bytes

LARGE = ("tiny:layers=12,heads=8,kv_heads=8,head_dim=64,positions=131072", "float32")
"""Model and precision whose pages are large (1.5 MiB) and cheap to compute."""
TINY = ("tiny", "float32")

SMALL_FILES = """
import os, sys, threading, time
from pathlib import Path
import libsym as sym
way, where, begins_s, seconds = sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:])
base = sym.kv_open("one.kv")
made = []
def work(thread):
    number = 0
    while time.time() < begins_s:
        time.sleep(0.001)
    while not number or time.time() < begins_s + seconds:  # one at least, however late a busy machine begins
        name = f"{way.replace(' ', '')}-{os.getpid()}-{thread}-{number}"
        if way == "plain":
            descriptor = os.open(where / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            os.close(descriptor)
        else:
            with sym.kv_fork(base, name) if "fork" in way else sym.kv_create(name) as kv:
                if "fork" not in way:
                    sym.kv_write(kv, [1])
                if "sync" in way:
                    sym.kv_sync(kv)
        number += 1
    made.append(number)
threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(made))
"""
DECODERS = """
import sys, threading
import libsym as sym
def work():
    while True:
        with sym.kv_create() as kv:
            list(sym.generate(kv, [1, 2, 3], stop_at_end=False, max_tokens=300))
for _ in range(int(sys.argv[1])):
    threading.Thread(target=work).start()
"""
MOVER = """
import sys, time
import libsym as sym
way, period_s = sys.argv[1], float(sys.argv[2])
files = [sym.kv_open(name) for name in ("one.kv", "two.kv")]
began_s, turn = time.monotonic(), 0
while True:
    going, coming = files[turn % 2], files[1 - turn % 2]
    if way == "swap":
        sym.kv_advise(going, sym.COLD)
        sym.kv_advise(coming, sym.WILLNEED)
    elif way != "rest":
        with sym.kv_extract(going, [(1, 2001)], f"written-{time.time_ns()}.kv", rebase=False) as kv:
            if way == "sync":
                sym.kv_sync(kv)
            sym.kv_remove(kv)
    turn += 1
    time.sleep(max(0.0, began_s + turn * period_s - time.monotonic()))
"""
"""Program that acts once in each period: it writes, it writes and syncs, or it swaps one of two files."""
PLAIN_MOVER = """
import mmap, os, sys, time
path, num_bytes, way, period_s = sys.argv[1], int(sys.argv[2]) // 4096 * 4096, sys.argv[3], float(sys.argv[4])
mapped = mmap.mmap(-1, num_bytes)
mapped.madvise(mmap.MADV_HUGEPAGE)
memory = memoryview(mapped)
memory[:] = b"s" * num_bytes
try:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
except OSError:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
began_s, turn, is_there = time.monotonic(), 0, False
while True:
    for offset in range(0, num_bytes, 8 << 20):
        (os.preadv if is_there and way == "plain reads" else os.pwritev)(
            descriptor, [memory[offset : offset + (8 << 20)]], offset
        )
    if way == "plain writes":
        os.fdatasync(descriptor)
    is_there = True
    turn += 1
    time.sleep(max(0.0, began_s + turn * period_s - time.monotonic()))
"""
"""Program outside of Symphony that reads or writes as many bytes as MOVER, in the same bursts."""


class Bench:
    """A run of the benchmark: its options, its directory, its daemons and its results."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory = args, directory
        self.rows: list[Row] = []
        self.held: list[str] = []
        self.size = parse_bytes(args.size or ("64M" if args.quick else "1G"))

    def options(self, state: str, precision: str, memory: str) -> tuple[str | Path, ...]:
        return "--precision", precision, "--kv-memory", memory, "--state", self.directory / state

    @contextmanager
    def daemon(self, state: str, kind: tuple[str, str] = ("", ""), memory: str = "1G") -> Iterator[Daemon]:
        """Yield a daemon with loaded weights, connected to this process. Note how long its trio thread was held."""
        model, precision = kind[0] or self.args.model, kind[1] or self.args.precision
        with connected(model, *self.options(state, precision, memory)) as daemon:
            yield daemon
            held = sym.daemon_stat()["held"]
            times = f"{held['num_long']:>6} of {held['num']:>8} times for more than 1 ms"
            self.held.append(f"held, {state:12}{times}, at most {1e3 * held['longest_s']:.1f} ms")

    def add(
        self, what: str, unit: str, ours: list[float], peer: str = "", peers: list[float] | None = None, aim: str = ""
    ) -> None:
        self.rows.append(Row(what, unit, ours, peer, peers or [], aim))
        print(self.rows[-1].line(), file=sys.stderr, flush=True)


def some_tokens(count: int) -> list[int]:
    return [11 + index % 89 for index in range(count)]


def long_file(name: str, num_tokens: int) -> sym.KV:
    """Make a long file from copies of 256 entries, since computing all entries would take minutes."""
    with sym.kv_create() as source:
        sym.kv_write(source, some_tokens(257))
        return sym.kv_extract(source, [(1, None)] * (num_tokens // 256), name, rebase=False)


def put_on_disk(path: Path) -> None:
    os.setxattr(path, "user.kv.tier", b"disk")


def written_bytes() -> int:
    return int(sym.daemon_stat()["disk"]["written_bytes"])


def sync(bench: Bench) -> None:
    plain, found = bench.directory / "plain", dict[str, list[float]]()
    rounds, num_pieces = bench.args.rounds, 2 if bench.args.quick else 10
    with bench.daemon("sync"):
        for number in range(rounds + 1):  # the first round warms up
            kv = sym.kv_create("synced.kv")
            sym.kv_write(kv, some_tokens(1000))
            before = written_bytes()
            took_s = seconds_of(partial(sym.kv_sync, kv))
            num_bytes = written_bytes() - before
            plain_s = seconds_of(partial(plain_write, plain, num_bytes))
            plain_s += seconds_of(partial(plain_append, bench.directory / "log"))
            sym.kv_remove(kv)
            if number:
                found.setdefault("small", []).append(1e3 * took_s)
                found.setdefault("plain", []).append(1e3 * plain_s)
    what = f"kv_sync of 1,000 tokens, {num_bytes / 1e6:.0f} MB"
    bench.add(what, "ms", found["small"], "write, fdatasync; append, fsync", found["plain"], "as fast")
    memory = f"{rounds * num_pieces * 52 + 200}M"
    with bench.daemon("large", LARGE, memory), sym.kv_create("source.kv") as source:
        sym.kv_write(source, [1 + index % 89 for index in range(1024)])
        sym.kv_sync(source)
        for number in range(rounds):
            with sym.kv_extract(source, [(1, None)] * num_pieces, f"{number}.kv", rebase=False) as kv:
                before = written_bytes()
                took_s = seconds_of(partial(sym.kv_sync, kv))
                size = written_bytes() - before
            found.setdefault("kv_sync", []).append(size / took_s / 1e6)
            found.setdefault("write", []).append(size / seconds_of(partial(plain_write, plain, size)) / 1e6)
    with bench.daemon("large", LARGE, memory):
        for number in range(rounds):
            took_s = seconds_of(lambda number=number: sym.kv_open(f"{number}.kv").close())  # type: ignore[misc]
            found.setdefault("kv_open", []).append(size / took_s / 1e6)
            found.setdefault("read", []).append(size / seconds_of(partial(plain_read, plain)) / 1e6)
    bench.add(f"kv_sync of {size / 1e6:.0f} MB", "MB/s", found["kv_sync"], "plain writes", found["write"], "0.7")
    bench.add("kv_open of these after a restart", "MB/s", found["kv_open"], "plain reads", found["read"], "0.7")


def history(bench: Bench) -> None:
    num_tokens = 700 if bench.args.quick else 7000
    tokens, took_ms = some_tokens(num_tokens), dict[str, list[float]]()
    with bench.daemon("history"), sym.kv_create("history.kv") as kv:
        sym.kv_write(kv, tokens)
        sym.kv_sync(kv)
    for _ in range(bench.args.rounds):
        with bench.daemon("history") as daemon:
            sym.close()
            for way in ("after a restart", "from disk", "computed again"):
                if way == "from disk":
                    put_on_disk(daemon.mount / "history.kv")
                began_s = time.perf_counter()
                sym.connect(daemon.socket)
                before = sym.daemon_stat()["num_tokens"]
                kv = sym.kv_create() if way == "computed again" else sym.kv_open("history.kv", "rw")
                sym.pred(kv, [*tokens, 7] if way == "computed again" else [7])
                took_ms.setdefault(way, []).append(1e3 * (time.perf_counter() - began_s))
                computed = sym.daemon_stat()["num_tokens"] - before
                wanted = num_tokens + 1 if way == "computed again" else 1
                assert computed == wanted, f"{computed} tokens were computed, not {wanted}"
                kv.truncate(num_tokens)
                kv.close()
                if way != "computed again":
                    sym.close()
    prefill = took_ms.pop("computed again")
    for way, each in took_ms.items():
        what = f"connect, kv_open, pred {way}, {num_tokens:,} tokens"
        bench.add(what, "ms", each, "prefill", prefill, "0.05")


def small(bench: Bench) -> None:
    ways = ("fork, sync", "fork", "write, sync", "write", "plain")
    begins_s, seconds = (0.3, 0.2) if bench.args.quick else (1.0, 4.0)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    with bench.daemon("small", TINY, "2G") as daemon, sym.kv_create("one.kv") as one:
        sym.kv_write(one, [1])
        sym.kv_sync()
        for number in range(bench.args.rounds):
            for way in rotated(ways, number):
                words = (SMALL_FILES, way, bench.directory, time.time() + begins_s, seconds)
                programs = [daemon.program(*words) for _ in range(4)]
                rates[way].append(sum(int(program.communicate()[0]) for program in programs) / seconds)
                sym.kv_sync()
    forked, written = rates["fork, sync"], rates["write, sync"]
    bench.add("fork and kv_sync, 64 threads", "files/s", forked, "without sync", rates["fork"], "1,000/s")
    bench.add("the same", "files/s", forked, "plain file, 4 KiB, fsync", rates["plain"])
    bench.add("create, one token, kv_sync", "files/s", written, "without sync", rates["write"], "1,000/s")


def restart(bench: Bench) -> None:
    num_files = 1_000 if bench.args.quick else 100_000
    with bench.daemon("restart", TINY, "64M"), sym.kv_create("base.kv") as base:
        sym.kv_write(base, [1] * 100)
        began_s = time.perf_counter()
        for number in range(num_files):
            if number % 1_000 == 0:
                sym.kv_mkdir(f"d{number // 1000}")
            sym.kv_fork(base, f"d{number // 1000}/{number}.kv").close()
        bench.add(f"{num_files:,} forks", "forks/s", [num_files / (time.perf_counter() - began_s)])
        bench.add("kv_sync() behind them", "ms", [1e3 * seconds_of(sym.kv_sync)])
    listed_ms, found_ms = [], []
    for _ in range(bench.args.rounds):
        began_s = time.perf_counter()
        with served("tiny", *bench.options("restart", "float32", "64M")) as daemon:
            os.listdir(daemon.mount)  # noqa: PTH208 - the call itself
            listed_ms.append(1e3 * (time.perf_counter() - began_s))
            (daemon.mount / "d0" / "7.kv").stat()
            found_ms.append(1e3 * (time.perf_counter() - began_s))
    bench.add(f"from exec to ls, {num_files:,} files", "ms", listed_ms, aim="2,000")
    bench.add("from exec to stat of a file", "ms", found_ms, aim="2,000")


def decoding(bench: Bench) -> None:
    seconds, is_quick = (0.6, True) if bench.args.quick else (6.0, False)
    plain = "plain writes", "plain reads"
    all_ways = ("rest", "sync") if is_quick else ("rest", "write", "sync", "swap")
    for num_streams, ways in (8, (*all_ways, *plain)), (64, ("rest", "swap")):
        with bench.daemon(f"{num_streams} streams") as daemon:
            for name in ("one.kv", "two.kv"):
                with long_file(name, 2304 if is_quick else 8192) as kv:
                    sym.kv_sync(kv)
                    num_bytes = written_bytes() // 2
            with beside(daemon.program(DECODERS, num_streams)):
                size = {"plain reads": num_bytes, "plain writes": num_bytes * 2000 // 8192}
                turns = {way: partial(decoded, daemon, way, 0.2 if is_quick else 0.25, seconds, size) for way in ways}
                found = in_turns(turns, bench.args.rounds, warm=0)
        rates = {way: [rate for rate, *_ in each] for way, each in found.items()}
        for way in ways[1:]:
            moved = statistics.median(bytes_a_s for _, bytes_a_s, _ in found[way]) / 1e6
            assert moved > 1 or way not in ("sync", "swap"), f"nothing moved: {way}"
            what = f"{num_streams} streams beside a program: {way}" + (f", {moved:.0f} MB/s" if moved > 1 else "")
            bench.add(what, "tokens/s", rates[way], "it rests", rates["rest"], "" if way in plain else "0.95")
        for name, part in ("p50", 0.5), ("p99", 0.99):
            took = {way: [quantile(each_ms, part) for *_, each_ms in each] for way, each in found.items()}
            for way in ways[1:]:
                what = f"{num_streams} streams, kv_sync of a fork beside: {way}, {name}"
                bench.add(what, "ms", took[way], "it rests", took["rest"])


def decoded(
    daemon: Daemon, way: str, period_s: float, seconds: float, size: dict[str, int]
) -> tuple[float, float, list[float]]:
    """Return the tokens a second, the bytes a second that the daemon wrote to disk or read, and the times in
    milliseconds of kv_sync() of an unchanged fork, ten times a second.
    """
    program: AbstractContextManager[object] = nullcontext()
    if way in size:
        program = beside(daemon.program(PLAIN_MOVER, daemon.where / "plain", size[way], way, period_s))
    elif way != "rest":
        program = beside(daemon.program(MOVER, way, period_s))
    with program, sym.kv_open("one.kv") as one:
        time.sleep(min(1.0, seconds))  # the program begins
        before, began_s = sym.daemon_stat(), time.perf_counter()
        kind, least = ("read_bytes", 2e6) if way == "swap" else ("written_bytes", 2e6 * (way == "sync"))
        each_ms: list[float] = []
        while True:  # once, unless others keep the machine from decoding or moving anything
            stop_s = time.perf_counter() + seconds
            while time.perf_counter() < stop_s:
                with sym.kv_fork(one, "fork.kv") as fork:
                    each_ms.append(1e3 * seconds_of(partial(sym.kv_sync, fork)))
                    sym.kv_remove(fork)
                time.sleep(0.1)
            after, took_s = sym.daemon_stat(), time.perf_counter() - began_s
            num_tokens = after["num_tokens"] - before["num_tokens"]
            num_bytes = after["disk"][kind] - before["disk"][kind]
            if (num_tokens and num_bytes >= least * took_s) or took_s > 20 * seconds:
                return num_tokens / took_s, num_bytes / took_s, each_ms


def swaps(bench: Bench) -> None:
    found = swap_rates(bench.directory / "swaps", bench.size, bench.args.rounds)
    text = f"{bench.size / 2**20:.0f} MiB"
    bench.add(f"swap-out of {text}", "MB/s", found["out"], "O_DIRECT writes, new room", found["disk new"], "0.7")
    bench.add("the same", "MB/s", found["out"], "O_DIRECT writes in place", found["disk out"])
    bench.add(f"swap-in of {text}", "MB/s", found["in"], "O_DIRECT reads", found["disk in"], "0.7")


def image(bench: Bench) -> None:
    rates: dict[str, list[float]] = {"hashed first": [], "again": [], "dd": []}
    with bench.daemon("image", memory=f"{bench.size // 2**20}M") as daemon:
        for number in range(bench.args.rounds):
            kv, path = long_file(f"cold{number}.kv", 2048 if bench.args.quick else 20_480), daemon.mount
            path /= f"cold{number}.kv"
            sym.kv_sync(kv)
            put_on_disk(path)
            num_in, num_bytes = sym.daemon_stat()["tiers"]["num_in"], path.stat().st_size
            for way in ("hashed first", "again"):
                rates[way].append(num_bytes / seconds_of(partial(read_past_cache, path)) / 1e6)
            assert sym.daemon_stat()["tiers"]["num_in"] == num_in, "pages came into memory for a reader"
            slots = max((bench.directory / "image" / "slots").glob("*.kv"), key=lambda each: each.stat().st_size)
            dd = ["dd", f"if={slots}", "of=/dev/null", "bs=8M", "iflag=direct,count_bytes", f"count={num_bytes}"]
            took_s = seconds_of(partial(subprocess.run, dd, check=True, stderr=subprocess.DEVNULL))
            rates["dd"].append(num_bytes / took_s / 1e6)
            sym.kv_remove(kv)
    for way in ("hashed first", "again"):
        what = f"reading a cold image of {num_bytes / 1e6:.0f} MB, {way}"
        bench.add(what, "MB/s", rates[way], "dd of the slots, 8M, direct", rates["dd"])


def read_past_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(descriptor, 1 << 20):
        pass
    os.close(descriptor)


PARTS = {each.__name__: each for each in (sync, history, small, restart, decoding, swaps, image)}


def main() -> None:
    state = (Path, "where scratch states and the peers' files are made and removed")
    size = ("", "of the swaps and of the memory for an image (default 1G, or 64M)")
    kinds = {"only": ",".join(PARTS), "model": "smollm2", "precision": "bf16", "save": str}
    args = arguments(__doc__, **kinds, state=state, size=size, rounds=5, quick=False, json=False).parse_args()
    names = chosen(args.only, PARTS)
    if args.quick:
        args.rounds = 1
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules stay compiled for the next start
    with tempfile.TemporaryDirectory(prefix="symphony-bench-", dir=args.state) as directory:
        bench = Bench(args, Path(directory))
        for name in names:
            PARTS[name](bench)
    show_rows(bench.rows, f"{processor()}; {args.model} {args.precision}", args, *bench.held)


if __name__ == "__main__":
    main()
