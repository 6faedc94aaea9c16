#!/usr/bin/env python3
"""What it costs to keep files, and what it saves: each figure beside its peer, in turns, in one run.

    .venv/bin/python scripts/bench/durable.py [--model smollm2] [--precision bf16] [--state DIR] [--rounds 5] [--quick]

Real daemons, one after the other, on scratch states. The peers are what plain programs get from the same file system:
O_DIRECT, pieces of 8 MiB, fdatasync; fio too, if it is installed. A ratio says how many times as fast Symphony is as
its peer, round by round: the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from durable_daemons import Bench, Row  # noqa: E402 - the path comes first
from durable_peers import fio_rate, plain_append, plain_read, plain_write  # noqa: E402
from durable_programs import DECODERS, SMALL_FILES, START_PARTS, WRITER  # noqa: E402

import libsym as sym  # noqa: E402

SYNCED_TOKENS = 1_000
HISTORY_TOKENS = 7_000
LARGE_MODEL = "tiny:layers=12,heads=8,kv_heads=8,head_dim=64,positions=131072"
"""In float32: pages of 1.5 MiB, so that no time goes into computing them."""
LARGE_SOURCE_TOKENS = 1_024


def seconds_of(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def rotated(ways: list[Any], number: int) -> list[Any]:
    """Another one goes first each round."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


# The figures


def synced_file(bench: Bench) -> None:
    """kv_sync of a file of a thousand tokens, from when they are computed."""
    plain, log = bench.directory / "plain", bench.directory / "log"
    ours_s, peers_s = [], []
    with bench.daemon("a synced file", "history"):
        for number in range(bench.rounds + 1):
            kv = sym.kv_create(f"synced{number}.kv")
            sym.kv_write(kv, [11 + index % 89 for index in range(SYNCED_TOKENS)])
            before = sym.daemon_stat()["disk"]["written_bytes"]
            took_s = seconds_of(lambda kv=kv: sym.kv_sync(kv))  # type: ignore[misc]
            num_bytes = sym.daemon_stat()["disk"]["written_bytes"] - before
            plain.unlink(missing_ok=True)
            plain_s = seconds_of(lambda size=num_bytes: (plain_write(plain, size), plain_append(log)))  # type: ignore[misc]
            sym.kv_remove(kv)
            if number:  # the first round warms up
                ours_s.append(took_s)
                peers_s.append(plain_s)
    what = f"kv_sync of {SYNCED_TOKENS:,} tokens, {num_bytes / 1e6:.0f} MB"
    bench.times(what, ours_s, "write, fdatasync; append, fsync", peers_s, "as fast")


def large_file(bench: Bench) -> None:
    """Rates of writing back and reading back."""
    num_pieces = 2 if bench.is_quick else 10
    plain, rates = bench.directory / "plain", dict[str, list[float]]()
    sizes = []
    memory = f"{bench.rounds * num_pieces * 52 + 200}M"
    options = ("large", LARGE_MODEL, "float32", memory)
    with bench.daemon("write-back of a large file", *options):
        source = sym.kv_create("source.kv")
        sym.kv_write(source, [1 + index % 89 for index in range(LARGE_SOURCE_TOKENS)])
        sym.kv_sync(source)
        for number in range(bench.rounds):
            kv = sym.kv_extract(source, [(1, None)] * num_pieces, f"large{number}.kv", rebase=False)
            before = sym.daemon_stat()["disk"]["written_bytes"]
            took_s = seconds_of(lambda kv=kv: sym.kv_sync(kv))  # type: ignore[misc]
            size = sym.daemon_stat()["disk"]["written_bytes"] - before
            sizes.append(size)
            rates.setdefault("write", []).append(size / took_s / 1e6)
            plain.unlink(missing_ok=True)
            plain_s = seconds_of(lambda size=size: plain_write(plain, size))  # type: ignore[misc]
            rates.setdefault("plain write", []).append(size / plain_s / 1e6)
            if shutil.which("fio"):
                plain.unlink()
                rates.setdefault("fio write", []).append(fio_rate(plain, size, "write"))
            kv.close()
    with bench.daemon("read-back of a large file", *options):
        for number in range(bench.rounds):
            began_s = time.perf_counter()
            sym.kv_open(f"large{number}.kv").close()
            took_s = time.perf_counter() - began_s
            rates.setdefault("read", []).append(sizes[number] / took_s / 1e6)
            for peer, keeps in (("plain read", False), ("plain read that keeps", True)):
                plain_s = seconds_of(lambda keeps=keeps: plain_read(plain, keeps=keeps))  # type: ignore[misc]
                rates.setdefault(peer, []).append(plain.stat().st_size / plain_s / 1e6)
            if shutil.which("fio"):
                rates.setdefault("fio read", []).append(fio_rate(plain, sizes[number], "read"))
    size_text = f"{statistics.median(sizes) / 1e6:.0f} MB"
    for way, what in (("write", f"kv_sync of {size_text}"), ("read", f"kv_open of {size_text} after a restart")):
        for peer in (f"plain {way}", f"plain {way} that keeps", f"fio {way}"):
            if peer in rates:
                bench.rates(what, "MB/s", rates[way], peer, rates[peer], "0.7")


def history(bench: Bench) -> None:
    """A long history after a restart, against computing it again."""
    num_tokens = 700 if bench.is_quick else HISTORY_TOKENS
    tokens = [11 + index % 89 for index in range(num_tokens)]
    with bench.daemon("prefill of a history", "history"):
        kv = sym.kv_create("history.kv")
        prefill_s = seconds_of(lambda: sym.pred(kv, tokens))
        sym.kv_sync(kv)
    ours_s = []
    for _ in range(bench.rounds):
        with bench.daemon("a history after a restart", "history"):
            before = sym.daemon_stat()["num_tokens"]
            sym.close()
            began_s = time.perf_counter()
            sym.connect(bench.socket)
            kv = sym.kv_open("history.kv", "rw")
            sym.pred(kv, [7])
            ours_s.append(time.perf_counter() - began_s)
            computed = sym.daemon_stat()["num_tokens"] - before
            assert computed == 1, f"{computed} tokens were computed, of which one is new"
            sym.kv_truncate(kv, num_tokens)
    what = f"connect, kv_open, pred after {num_tokens:,} tokens"
    bench.times(what, ours_s, "prefill", [prefill_s] * len(ours_s), "20")


def small_files(bench: Bench) -> None:
    """Files a second, of 64 threads."""
    ways = ["fork, sync", "fork", "write, sync", "write", "plain"]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    num_processes, num_threads, seconds = 4, 16, 1.0 if bench.is_quick else 4.0
    plain = bench.directory / "small"
    plain.mkdir()
    with bench.daemon("small synced files", "small", "tiny", "float32", "2G"):
        one = sym.kv_create("one.kv")
        sym.kv_write(one, [1])
        sym.kv_sync()
        for number in range(bench.rounds):
            for way in rotated(ways, number):
                begins_s = time.time() + 1.0
                programs = [
                    bench.program(SMALL_FILES, way, num_threads, begins_s, seconds, plain) for _ in range(num_processes)
                ]
                made = sum(int(program.communicate()[0]) for program in programs)
                rates[way].append(made / seconds)
                if way != "plain":
                    sym.kv_sync()
    forked, written = rates["fork, sync"], rates["write, sync"]
    bench.rates("fork and kv_sync, 64 threads", "files/s", forked, "without sync", rates["fork"], "1,000/s")
    bench.rates("the same", "files/s", forked, "plain file, 4 KiB, fsync", rates["plain"])
    bench.rates("create, one token, kv_sync", "files/s", written, "without sync", rates["write"], "1,000/s")


def restart(bench: Bench) -> None:
    """Until the names of many files are there."""
    num_files = 5_000 if bench.is_quick else 100_000
    state = ("many", "tiny", "float32", "64M")
    with bench.daemon("forks and their commits", *state):
        base = sym.kv_create("base.kv")
        sym.kv_write(base, [1] * 100)
        began_s = time.perf_counter()
        for number in range(num_files):
            if number % 1_000 == 0:
                sym.kv_mkdir(f"d{number // 1000}")
            sym.kv_fork(base, f"d{number // 1000}/{number}.kv").close()
        forked_s = time.perf_counter() - began_s
        sym.kv_sync()
        synced_s = time.perf_counter() - began_s - forked_s
    bench.rows.append(Row(f"{num_files:,} forks", "forks/s", num_files / forked_s))
    bench.rows.append(Row("kv_sync() behind them", "ms", synced_s * 1e3))
    listed_s, found_s = [], []
    for _ in range(bench.rounds):
        began_s = time.perf_counter()
        served = bench.start(*state)
        os.listdir(bench.mount)  # noqa: PTH208 - the call itself
        listed_s.append(time.perf_counter() - began_s)
        (bench.mount / "d0" / "7.kv").stat()
        found_s.append(time.perf_counter() - began_s)
        bench.stop(served)
    bench.rows.append(
        Row(f"from exec to ls, {num_files:,} files", "ms", statistics.median(listed_s) * 1e3, aim="2,000")
    )
    bench.rows.append(Row("from exec to stat of a file", "ms", statistics.median(found_s) * 1e3, aim="2,000"))
    served = bench.start(*state, program=("-c", START_PARTS))
    bench.parts = json.loads(bench.ready_line)
    bench.stop(served)


def decoding(bench: Bench) -> None:
    """Tokens a second of four generations, while another program dirties and syncs pages all the time."""
    seconds, period_s, num_tokens = (1.0 if bench.is_quick else 4.0), 0.25, 2_000
    ways: dict[str, tuple[object, ...]] = {
        "alone": (),
        "written, never synced": ("dirty", num_tokens, period_s),
        "written and synced": ("sync", num_tokens, period_s),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    written = []
    with bench.daemon("decoding beside write-back", "decoding"):
        source = sym.kv_create("source.kv")
        sym.kv_write(source, [11 + index % 89 for index in range(1_025)])
        with sym.kv_extract(source, [(1, None)] * 2, rebase=False) as longer:
            sym.kv_extract(longer, [(0, None)], "longer.kv", rebase=False).close()
        sym.kv_remove(source)
        sym.kv_rename("longer.kv", "source.kv")
        sym.kv_sync()
        with bench.beside(DECODERS, 4):
            for number in range(bench.rounds):
                for way, arguments in rotated(list(ways.items()), number):
                    rate, bytes_a_s = _decoded(bench, arguments, seconds)
                    rates[way].append(rate)
                    if way == "written and synced":
                        written.append(bytes_a_s / 1e6)
    synced = rates["written and synced"]
    what = f"decoding beside a writer that syncs {statistics.median(written):.0f} MB/s"
    bench.rates(what, "tokens/s", synced, "it writes, and syncs nothing", rates["written, never synced"], "0.97")
    bench.rates("the same", "tokens/s", synced, "no writer", rates["alone"])


def _decoded(bench: Bench, arguments: tuple[object, ...], seconds: float) -> tuple[float, float]:
    """Tokens a second, and bytes written a second."""

    def counted() -> tuple[float, float]:
        time.sleep(0.5)  # it gets under way
        before, began_s = sym.daemon_stat(), time.perf_counter()
        time.sleep(seconds)
        after, took_s = sym.daemon_stat(), time.perf_counter() - began_s
        num_bytes = after["disk"]["written_bytes"] - before["disk"]["written_bytes"]
        return (after["num_tokens"] - before["num_tokens"]) / took_s, num_bytes / took_s

    if not arguments:
        return counted()
    with bench.beside(WRITER, *arguments):
        return counted()


FIGURES: dict[str, Callable[[Bench], None]] = {
    "synced": synced_file,
    "large": large_file,
    "history": history,
    "small": small_files,
    "restart": restart,
    "decoding": decoding,
}


# The report


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    flags = [flag for flag in wanted if flag in found.get("flags", "").split()]
    return f"{found.get('model name', 'unknown')}, {os.cpu_count()} CPUs, {' '.join(flags)}"


def report(bench: Bench) -> None:
    print(f"\n{'':52}{'Symphony':>10} {'unit':9}{'peer':>10}  {'ratio':>6}  peer, and the aim")
    for row in bench.rows:
        line = f"{row.what:52}{row.ours:>10.1f} {row.unit:9}"
        peer = f"{row.peers:>10.1f}  {row.ratio:>6.2f}  {row.peer}" if row.peer else f"{'':>20}"
        print(line + peer + (f"; aim {row.aim}" if row.aim else ""))
    if bench.parts:
        print("a start, ms: " + ", ".join(f"{name} {1e3 * took_s:.0f}" for name, took_s in bench.parts.items()))
    print("\nthe trio thread was held")
    for held in bench.held:
        bounds = ", ".join(f"{num} > {1e3 * bound_s:g}" for bound_s, num in sorted(held.beyond_s.items()))
        times = f"{held.num_long:>6} of {held.num:>8} times longer than 1 ms, at most {1e3 * held.longest_s:6.1f}"
        print(f"  {held.what:32}{times}   ({bounds})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what it costs to keep files, and what it saves.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--state", type=Path, help="where scratch states and the peers' files are made and removed")
    parser.add_argument("--rounds", type=int, default=0, help="measurements of each kind (default 5, or 2)")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast")
    parser.add_argument("--only", choices=FIGURES, action="append")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    with (
        tempfile.TemporaryDirectory(prefix="symphony-bench-") as sockets,
        tempfile.TemporaryDirectory(prefix="symphony-bench-", dir=options.state) as directory,
    ):
        bench = Bench(Path(directory), Path(sockets), options)
        for name in options.only or FIGURES:
            print(name, file=sys.stderr)
            FIGURES[name](bench)
    if options.json:
        found = {"rows": list(map(asdict, bench.rows)), "held": list(map(asdict, bench.held)), "start_s": bench.parts}
        print(json.dumps({"processor": processor(), "model": bench.model, "precision": bench.precision, **found}))
        return
    print(f"{processor()}; {bench.model} {bench.precision}, {bench.rounds} rounds in turns, medians")
    report(bench)


if __name__ == "__main__":
    main()
