#!/usr/bin/env python3
"""Measure how soon a daemon answers with a context that a daemon of another machine has computed, and names in etcd.

    .venv/bin/python scripts/bench/fleet.py [--quick] [--rounds 5] [--model smollm2] [--tokens 7000] [--save NAME]
        [--json]

Two daemons of this machine are peers over loopback, with TLS. In turns, the second daemon fetches a context from the
first one, and computes the same context itself. Each turn begins without files of the second daemon.

If there is an etcd (Debian's etcd-server), two further daemons share the directory `/kv/fleet`, and the second one
changes names there and opens files that the first one has synced.

Besides, work that computing bounds, on one of two such daemons and on both: each daemon has a core and its own program.

If there is a Mooncake Store, too (the extra `fleet`), two daemons fetch the context in turns: `second` gets the pages
from the store, and `third` from the first daemon. Nearly all memory of the store is on the first daemon's side.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Daemon, Row, arguments, connected, in_turns, processor, served, show_rows, word_tokens

import libsym as sym
from libsym.abi import PAGE_ENTRIES
from symphony.fleet.keys import make_keys

NAME, NEW = "context.kv", 1000
"""The file with the context, and how many of its tokens are new to a daemon that knows the others."""


def tokens_of(count: int) -> list[int]:
    words = word_tokens()
    return (words * (count // len(words) + 1))[:count]


def first_token_s(kv: sym.KV, began_s: float) -> float:
    """Return the time from `began_s` until the row of a token behind the context is there."""
    with kv.fork() as fork:
        sym.pred(fork, tokens_of(1))
    return time.perf_counter() - began_s


def fetched(known: int) -> tuple[float, float]:
    """Fetch the context, of which the daemon has the first `known` tokens. Return the times of the fetch, and until the
    first token.
    """
    if known:
        with sym.kv_fetch("first", f"{known}.kv", "known.kv"):
            pass
    began_s = time.perf_counter()
    with sym.kv_fetch("first", NAME, "copy.kv") as kv:
        taken_s = time.perf_counter() - began_s
        found_s = first_token_s(kv, began_s)
    for entry in sym.kv_list():
        sym.kv_remove(entry.name)
    return taken_s, found_s


def computed(num_tokens: int) -> tuple[float, float]:
    began_s = time.perf_counter()
    with sym.kv_create() as kv:
        sym.pred(kv, tokens_of(num_tokens))
        return time.perf_counter() - began_s, first_token_s(kv, began_s)


def make_contexts(first: Daemon, num_tokens: int, known: int) -> int:
    """Compute the whole context and its beginning on the first daemon. Return the size of the whole file in bytes."""
    sym.connect(first.socket)
    try:
        with sym.kv_create(NAME) as kv:
            kv.write(tokens_of(known))
            with kv.fork(f"{known}.kv"):
                pass
            kv.write(tokens_of(num_tokens)[known:])
        return (first.mount / NAME).stat().st_size
    finally:
        sym.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def an_etcd(directory: Path) -> Iterator[str]:
    """Run a member of etcd without other members. Yield its address."""
    url, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        *("etcd", "--name", "m", "--data-dir", str(directory / "etcd"), "--initial-cluster", f"m={peers}"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def timed(found: dict[str, list[float]], what: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    found.setdefault(what, []).append((time.perf_counter() - began_s) * 1e3)


def names_ms(first: Daemon, rounds: int) -> dict[str, list[float]]:
    """Change names, and open files that `first` has synced. The program is connected to the second daemon."""
    found = dict[str, list[float]]()
    for number in range(rounds):
        there, here = f"fleet/there-{number}.kv", f"fleet/here-{number}.kv"
        with sym.connection(first.socket), sym.kv_create(there) as kv:
            kv.write(tokens_of(100))
            sym.kv_sync(kv)
        for what in ("open, fetched from the other machine", "open, again"):
            with timed(found, what):
                sym.kv_open(there).close()
        with timed(found, "mkdir"):
            sym.kv_mkdir(f"fleet/{number}")
        with timed(found, "rename"):
            sym.kv_rename(f"fleet/{number}", f"fleet/{number}-new")
        with sym.kv_open(there) as source, timed(found, "fork"):
            fork = source.fork(here)
        fork.write([1])
        with timed(found, "kv_sync, two copies"):
            sym.kv_sync(fork)
        fork.close()
        with timed(found, "stat"):
            sym.kv_stat(there)
        with timed(found, "remove"):
            sym.kv_remove(here)
    return found


def member(directory: Path, url: str, name: str) -> list[str | Path]:
    """Return options of a daemon of a fleet."""
    where = f"127.0.0.1:{free_port()}"
    keys = directory / name
    return ["--etcd", url, "--machine", name, "--peer-keys", keys, "--peer-listen", where, "--copies", "1"]


def names_rows(model: str, directory: Path, rounds: int) -> list[Row]:
    """Return rows of names in etcd. They are missing if there is no etcd."""
    if shutil.which("etcd") is None:
        return []
    with an_etcd(directory) as url:
        first_options, second_options = (member(directory, url, name) for name in ("first", "second"))
        with served(model, *first_options) as first, connected(model, *second_options):
            found = names_ms(first, rounds)
    aims = {"open, again": "5"}
    return [Row(f"/kv/fleet: {what}", "ms", figures, aim=aims.get(what, "")) for what, figures in found.items()]


WORK = """
import sys
import libsym as sym

first_token, length = map(int, sys.argv[1:])
jobs = 0
for line in sys.stdin:
    kind, count = line.split()
    for job in range(int(count)):
        jobs += 1
        begin = [(first_token + jobs) % 200, jobs // 200 % 200]  # no two jobs have a prefix in common
        if kind == "prefill":
            with sym.kv_create() as kv:
                kv.write(begin + [3] * length)
        else:
            files = [sym.kv_create() for _ in range(32)]
            streams = [
                sym.generate(kv, [*begin, number], max_tokens=32, stop_at_end=False) for number, kv in enumerate(files)
            ]
            for stream in streams:
                list(stream)
            for kv in files:
                kv.close()
    print("done", flush=True)
"""
"""A program that computes prefills, or batches of 32 streams, as its standard input says."""
NUM_JOBS = 8


def working_ms(programs: list[subprocess.Popen[str]], kind: str) -> float:
    """Divide the jobs among programs, and return the milliseconds until all jobs are done."""
    began_s = time.perf_counter()
    for program in programs:
        print(kind, NUM_JOBS // len(programs), file=program.stdin, flush=True)
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "done\n"
    return (time.perf_counter() - began_s) * 1e3


def two_machines_rows(model: str, directory: Path, rounds: int, length: int) -> list[Row]:
    """Return rows of work on two machines, and on one of them. They are missing without etcd, or with a single core."""
    cores = sorted(os.sched_getaffinity(0))
    if shutil.which("etcd") is None or len(cores) == 1:
        return []
    programs = list[subprocess.Popen[str]]()
    with an_etcd(directory / "two") as url, ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        for number, name in enumerate(("first", "second")):
            os.sched_setaffinity(0, cores[number : number + 1])  # of the daemon and of the program, too
            daemon = stack.enter_context(served(model, *member(directory, url, name)))
            programs.append(stack.enter_context(daemon.program(WORK, 100 * number, length)))
        os.sched_setaffinity(0, cores)
        ways = {
            f"{kind} {count}": partial(working_ms, programs[:count], kind)
            for kind in ("prefill", "batch")
            for count in (2, 1)
        }
        found = in_turns(ways, rounds)
        for program in programs:
            program.communicate()
    what = {"prefill": f"{NUM_JOBS} prefills of {length} tokens", "batch": f"{NUM_JOBS} batches of 32 streams"}
    return [
        Row(
            f"two machines, {what[kind]}",
            "ms",
            found[f"{kind} 2"],
            "one machine",
            found[f"{kind} 1"],
            aim="ratio 0.556",
        )
        for kind in what
    ]


@contextmanager
def a_master() -> Iterator[str]:
    """Run the master of a Mooncake Store. Yield its address."""
    found, port = find_spec("mooncake"), free_port()
    assert found is not None
    assert found.origin is not None
    program = Path(found.origin).parent / "mooncake_master"
    own = "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"
    process = subprocess.Popen([program, *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def fetch_mb_s(daemon: Daemon, num_bytes: int) -> float:
    """Have a daemon fetch the context, and remove it."""
    with sym.connection(daemon.socket):
        began_s = time.perf_counter()
        sym.kv_fetch("first", NAME, "copy.kv").close()
        taken_s = time.perf_counter() - began_s
        sym.kv_remove("copy.kv")
    return num_bytes / 1e6 / taken_s


def wait_for_store(daemon: Daemon, count: str, least: int) -> None:
    """Wait until the store answers a daemon, and a count of pages has its value."""
    with sym.connection(daemon.socket):
        while (store := sym.daemon_stat()["fleet"]["store"])["trouble"] or store[count] < least:
            time.sleep(0.1)


def store_rows(model: str, directory: Path, rounds: int, num_tokens: int) -> list[Row]:
    """Return a row of fetches from the store and from the peer. It is missing if there is no etcd or no store."""
    if shutil.which("etcd") is None or find_spec("mooncake") is None:
        return []
    num_pages = num_tokens // PAGE_ENTRIES
    with an_etcd(directory / "store") as url, a_master() as master, ExitStack() as stack:
        given = {"first": "1G", "third": "", "second": "16M"}
        daemons = dict[str, Daemon]()
        for name, memory in given.items():
            store = ("--fleet-store", master, "--fleet-store-memory", memory) if memory else ()
            daemons[name] = stack.enter_context(served(model, *member(directory, url, name), *store))
        num_bytes = make_contexts(daemons["first"], num_tokens, num_tokens // 2)
        for name in ("first", "second"):
            wait_for_store(daemons[name], "pages_put", 0)
        fetch_mb_s(daemons["second"], num_bytes)
        wait_for_store(daemons["second"], "pages_put", num_pages)
        ways = {name: partial(fetch_mb_s, daemons[name], num_bytes) for name in ("second", "third")}
        found = in_turns(ways, rounds)
        wait_for_store(daemons["second"], "pages_got", (rounds + 1) * num_pages)
    return [Row("kv_fetch, pages from the store", "MB/s", found["second"], "from the peer", found["third"])]


def main() -> int:
    parser = arguments(__doc__, quick=False, rounds=5, model="smollm2", tokens=7000, save=str, json=False)
    args = parser.parse_args()
    if args.quick:
        args.model, args.rounds, args.tokens = "tiny:positions=4000", 2, 2000
    known = args.tokens - NEW
    with TemporaryDirectory() as name:
        make_keys(Path(name), ["first", "second", "third"])
        where = f"127.0.0.1:{free_port()}"
        listen = ("--peer-listen", where, "--peer-keys", Path(name) / "first")
        peers = ("--peers", f"first={where}", "--peer-keys", Path(name) / "second")
        with served(args.model, *listen) as first:
            num_bytes = make_contexts(first, args.tokens, known)
            with connected(args.model, *peers):
                ways = {
                    "fetch": partial(fetched, 0),
                    "delta": partial(fetched, known),
                    "compute": partial(computed, args.tokens),
                }
                found = in_turns(ways, args.rounds)
        rates = [num_bytes / 1e6 / taken_s for taken_s, _ in found["fetch"]]
        taken_ms = {way: [first_s * 1e3 for _, first_s in figures] for way, figures in found.items()}
        whole = f"{args.tokens:,} tokens, {num_bytes / 1e6:.0f} MB"
        rows = [
            Row(f"first token, {whole}", "ms", taken_ms["fetch"], "computed", taken_ms["compute"], aim="500"),
            Row(f"first token, {NEW:,} of them new here", "ms", taken_ms["delta"], "computed", taken_ms["compute"]),
            Row("kv_fetch", "MB/s", rates),
        ]
        rows += names_rows(args.model, Path(name), 3 if args.quick else 100)
        rows += two_machines_rows(args.model, Path(name), args.rounds, 100 if args.quick else 500)
        rows += store_rows(args.model, Path(name), args.rounds, args.tokens)
    slowest = statistics.median(taken_ms["compute"])
    show_rows(rows, f"Peers on one machine: {args.model}, {processor()}", args, f"computing takes {slowest:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
