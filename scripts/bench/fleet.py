#!/usr/bin/env python3
"""Measure how soon a daemon answers with a context that a daemon of another machine has computed.

    .venv/bin/python scripts/bench/fleet.py [--quick] [--rounds 5] [--model smollm2] [--tokens 7000] [--save NAME]
        [--json]

Two daemons of this machine are peers over loopback, with TLS. In turns, the second daemon fetches a context from the
first one, and computes the same context itself. Each turn begins without files of the second daemon.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Daemon, Row, arguments, connected, in_turns, processor, served, show_rows, word_tokens

import libsym as sym
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


def main() -> int:
    parser = arguments(__doc__, quick=False, rounds=5, model="smollm2", tokens=7000, save=str, json=False)
    args = parser.parse_args()
    if args.quick:
        args.model, args.rounds, args.tokens = "tiny:positions=4000", 2, 2000
    known = args.tokens - NEW
    with TemporaryDirectory() as name:
        make_keys(Path(name), ["first", "second"])
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
    slowest = statistics.median(taken_ms["compute"])
    show_rows(rows, f"Peers on one machine: {args.model}, {processor()}", args, f"computing takes {slowest:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
