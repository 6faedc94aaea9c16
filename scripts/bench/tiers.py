#!/usr/bin/env python3
"""What it costs that pages go to disk and come back: each figure beside its peer, in turns, in one run.

    .venv/bin/python scripts/bench/tiers.py [--size 1G] [--state DIR] [--rounds 5] [--only FIGURE] [--quick]

`rates` and `copies` are of the storage in this process; the others of real daemons with SmolLM2 on scratch states. A
ratio says how many times as fast Symphony is as its peer, round by round: the median of the rounds.
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
from dataclasses import asdict
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from durable import processor, report, rotated, seconds_of  # noqa: E402 - the path comes first
from durable_daemons import Bench  # noqa: E402
from durable_programs import DECODERS  # noqa: E402
from tiers_rates import copy_rates, swap_rates  # noqa: E402

import libsym as sym  # noqa: E402
from kvfs.sizes import parse_bytes  # noqa: E402

HISTORY_TOKENS = 7_000
STREAMS = 8, 64
PIECE_TOKENS = 256
SWAPPED_TOKENS = 8_192

SWAPPER = """
import sys, time
import libsym as sym
period_s, way = float(sys.argv[1]), sys.argv[2]
names = ["one.kv", "two.kv"]
files = [sym.kv_open(name) for name in names]
began_s, turn = time.monotonic(), 0
while True:
    going, coming = files[turn % 2], files[1 - turn % 2]
    if way == "swaps":
        sym.kv_advise(going, sym.COLD)
        sym.kv_advise(coming, sym.WILLNEED)
    turn += 1
    time.sleep(max(0.0, began_s + turn * period_s - time.monotonic()))
"""
"""What two files have on disk is read again and again. Beside it the same program that asks for nothing."""


def rates(bench: Bench, size: int) -> None:
    """Swap-out and swap-in beside the disk itself."""
    found = swap_rates(bench.directory / "rates", size, bench.rounds)
    text = f"{size / 2**20:.0f} MiB"
    bench.rates(f"swap-out of {text}", "MB/s", found["out"], "O_DIRECT writes, new room", found["disk new"], "0.7")
    bench.rates("the same", "MB/s", found["out"], "O_DIRECT writes in place", found["disk out"])
    bench.rates(f"swap-in of {text}", "MB/s", found["in"], "O_DIRECT reads", found["disk in"], "0.7")


def copies(bench: Bench, size: int) -> None:
    """Pages from frame to frame."""
    found = copy_rates(min(size, 256 << 20), bench.rounds)
    bench.rates("copying frames", "MB/s", found["frames"], "memcpy", found["memcpy"], "0.9")


def image(bench: Bench, size: int) -> None:
    """Reading the image of a file that is on disk, through the mount."""
    num_tokens = 2_048 if bench.is_quick else 20_480
    ways = {"first": [], "again": [], "dd": []}  # type: dict[str, list[float]]
    with bench.daemon("an image of a cold file", "image", memory=f"{size // 2**20}M"):
        hot = _long_file("hot.kv", 512)
        hot_before = sym.daemon_stat()["tiers"]
        for number in range(bench.rounds):
            kv = _long_file(f"cold{number}.kv", num_tokens)
            sym.kv_sync(kv)
            path = bench.mount / f"cold{number}.kv"
            _put_on_disk(path)
            before = sym.daemon_stat()["tiers"]
            num_bytes = path.stat().st_size
            for way in ("first", "again"):
                ways[way].append(num_bytes / seconds_of(partial(_read, path)) / 1e6)
            after = sym.daemon_stat()["tiers"]
            assert after["num_in"] == before["num_in"], "pages came into memory for a reader"
            assert after["num_dropped"] == before["num_dropped"], "pages went for a reader"
            slots = max((bench.directory / "image" / "slots").glob("*.kv"), key=lambda each: each.stat().st_size)
            ways["dd"].append(num_bytes / seconds_of(partial(_dd, slots, num_bytes)) / 1e6)
            sym.kv_remove(kv)
        assert sym.daemon_stat()["tiers"]["num_in"] == hot_before["num_in"]
        hot.close()
    what = f"reading a cold image of {num_bytes / 1e6:.0f} MB"
    bench.rates(f"{what}, hashed first", "MB/s", ways["first"], "dd of the slots, 8M, direct", ways["dd"])
    bench.rates(f"{what}, again", "MB/s", ways["again"], "dd of the slots, 8M, direct", ways["dd"])


def _long_file(name: str, num_tokens: int) -> sym.KV:
    """Of copies of a few entries: computing so many would take minutes."""
    with sym.kv_create() as source:
        sym.kv_write(source, [11 + index % 89 for index in range(PIECE_TOKENS + 1)])
        return sym.kv_extract(source, [(1, None)] * (num_tokens // PIECE_TOKENS), name, rebase=False)


def _put_on_disk(path: Path) -> None:
    os.setxattr(path, "user.kv.tier", b"disk")


def _read(path: Path) -> None:
    """Past what the kernel has of it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(descriptor, 1 << 20):
        pass
    os.close(descriptor)


def _dd(path: Path, num_bytes: int) -> None:
    command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct,count_bytes", f"count={num_bytes}"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def decoding(bench: Bench, _size: int) -> None:
    """Tokens a second of many generations, while files of others come from disk and go all the time."""
    seconds, period_s = (1.5, 0.5) if bench.is_quick else (6.0, 0.25)
    for num_streams in STREAMS:
        found: dict[str, list[float]] = {"rests": [], "swaps": []}
        moved: list[float] = []
        with bench.daemon(f"{num_streams} streams beside swaps", f"decoding{num_streams}", memory="1G"):
            for name in ("one.kv", "two.kv"):
                with _long_file(name, 768 if bench.is_quick else SWAPPED_TOKENS) as kv:
                    sym.kv_sync(kv)
            with bench.beside(DECODERS, num_streams):
                time.sleep(2)
                for number in range(bench.rounds):
                    for way in rotated(["rests", "swaps"], number):
                        rate, bytes_a_s = _decoded(bench, way, period_s, seconds)
                        found[way].append(rate)
                        if way == "swaps":
                            moved.append(bytes_a_s / 1e6)
        assert min(moved) > 1, "nothing was swapped"
        what = f"{num_streams} streams beside swaps of {statistics.median(moved):.0f} MB/s"
        bench.rates(what, "tokens/s", found["swaps"], "the swapper rests", found["rests"], "0.97")


def _decoded(bench: Bench, way: str, period_s: float, seconds: float) -> tuple[float, float]:
    """Tokens a second, and bytes read a second."""
    with bench.beside(SWAPPER, period_s, way):
        time.sleep(1.0)  # it gets under way
        before, began_s = sym.daemon_stat(), time.perf_counter()
        time.sleep(seconds)
        after, took_s = sym.daemon_stat(), time.perf_counter() - began_s
    num_bytes = after["disk"]["read_bytes"] - before["disk"]["read_bytes"]
    return (after["num_tokens"] - before["num_tokens"]) / took_s, num_bytes / took_s


def restart(bench: Bench, _size: int) -> None:
    """A conversation that is on disk, against computing it again."""
    num_tokens = 700 if bench.is_quick else HISTORY_TOKENS
    tokens = [11 + index % 89 for index in range(num_tokens)]
    from_disk_s, again_s = [], []
    with bench.daemon("a conversation from disk", "restart", memory="1G"):
        with sym.kv_create("history.kv") as kv:
            sym.kv_write(kv, tokens)
            sym.kv_sync(kv)
        for number in range(bench.rounds):
            for way in rotated(["disk", "again"], number):
                if way == "disk":
                    _put_on_disk(bench.mount / "history.kv")
                before = sym.daemon_stat()["num_tokens"]
                began_s = time.perf_counter()
                if way == "disk":
                    with sym.kv_open("history.kv", "rw") as kv:
                        sym.pred(kv, [7])
                        from_disk_s.append(time.perf_counter() - began_s)
                        sym.kv_truncate(kv, num_tokens)
                else:
                    with sym.kv_create() as kv:
                        sym.pred(kv, [*tokens, 7])
                        again_s.append(time.perf_counter() - began_s)
                computed = sym.daemon_stat()["num_tokens"] - before
                wanted = 1 if way == "disk" else num_tokens + 1
                assert computed == wanted, f"{computed} tokens were computed, not {wanted}"
    bench.times(f"kv_open and pred, {num_tokens:,} tokens on disk", from_disk_s, "prefill", again_s)


FIGURES: dict[str, Callable[[Bench, int], None]] = {
    "rates": rates,
    "copies": copies,
    "image": image,
    "decoding": decoding,
    "restart": restart,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what it costs that pages go to disk and come back.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument(
        "--size", type=parse_bytes, default=None, help="of the file that is swapped (default 1G, or 64M)"
    )
    parser.add_argument("--state", type=Path, help="where scratch states and the peers' files are made and removed")
    parser.add_argument("--rounds", type=int, default=0, help="measurements of each kind (default 5, or 2)")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast")
    parser.add_argument("--only", choices=FIGURES, action="append")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    size = options.size or (64 << 20 if options.quick else 1 << 30)
    with (
        tempfile.TemporaryDirectory(prefix="symphony-bench-") as sockets,
        tempfile.TemporaryDirectory(prefix="symphony-bench-", dir=options.state) as directory,
    ):
        bench = Bench(Path(directory), Path(sockets), options)
        for name in options.only or FIGURES:
            print(name, file=sys.stderr)
            FIGURES[name](bench, size)
    if options.json:
        found = {"rows": list(map(asdict, bench.rows)), "held": list(map(asdict, bench.held))}
        print(json.dumps({"processor": processor(), "model": bench.model, "precision": bench.precision, **found}))
        return
    print(f"{processor()}; {bench.model} {bench.precision}, {bench.rounds} rounds in turns, medians")
    report(bench)


if __name__ == "__main__":
    main()
