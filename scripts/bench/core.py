#!/usr/bin/env python3
"""Times of the core for the calls of a branch: fork, room, commit, cut and close, without a daemon around it.

    .venv/bin/python scripts/bench/core.py [--before TREE] [--rounds 5] [--quick] [--json]

Columns are microseconds of one call, the best of some thousand; with `--before`, those of another checkout beside, in
turns, and the ratio. `fork and close`: of a file of so many entries. `branch`: a fork, room for one entry, its pages
pinned, the commit, and the close. `append and cut`: room for one entry in a file of one's own, the commit, and the
file's old length again. `KV_FORK and KV_CLOSE`: a program's two calls, as the core carries them out where they lie in
the ring; its other handles are open. Rows differ in the file's entries, in the pool's pages, and in how many tables are
open: no call's work may grow with the last two. `-`: the other checkout does not have it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    (1, 10_000, 1),
    (32, 10_000, 1),
    (297, 10_000, 1),
    (7_000, 10_000, 1),
    (297, 10_000_000, 1),
    (297, 20_000, 10_000),
]
"""Entries, pages of the pool, tables that are open beside."""
SERVED = [(32, 1), (7_000, 1), (32, 10_000), (7_000, 10_000)]
"""Entries, and handles that are open beside: of a program's calls."""
CALLS = 2000


class Store:
    """Pages whose bytes nobody looks at."""

    page_bytes = 4096

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages


def best_us(call: Callable[[], object], calls: int) -> float:
    found = float("inf")
    for _ in range(10):
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        found = min(found, time.perf_counter() - began_s)
    return found / calls * 1e6


def measured(calls: int) -> dict[str, float]:
    """Microseconds of this process's checkout, by row and call."""
    import numpy as np

    from kvfs.pages.pool import PagePool
    from kvfs.pages.table import PageTable, Reservation

    is_of_core = len(inspect.signature(Reservation.ready).parameters) == 1

    def ready(reservation: Reservation) -> None:
        """The tables have no row: nothing counts uses."""
        if is_of_core:
            reservation.ready()
        else:
            reservation.ready(reservation.needed(), reservation.table.row, None)

    rows = {}
    for length, num_pages, num_open in ROWS:
        pool = PagePool(Store(num_pages))
        base = PageTable(pool, 1000)
        room = base.reserve(np.arange(length), np.arange(length))
        ready(room)
        room.commit_first(room.tokens)
        beside = [base.fork() for _ in range(num_open)]
        token, position = np.array([5], np.int32), np.array([length], np.int32)

        def append(table: PageTable, token=token, position=position) -> None:
            room = table.reserve(token, position)
            ready(room)
            room.pages_to_zero(1)
            room.commit_first(token)

        def branch(base=base, append=append) -> None:
            fork = base.fork()
            append(fork)
            fork.close()

        own = base.fork()

        def cut(own=own, append=append, length=length) -> None:
            append(own)
            own.truncate(length)

        what = f"{length:,} entries, {num_pages:,} pages, {num_open:,} open"
        for name, call in (
            ("fork and close", lambda base=base: base.fork().close()),
            ("branch", branch),
            ("append and cut", cut),
        ):
            rows[f"{what}: {name}"] = best_us(call, calls)
        for table in (own, *beside, base):
            table.close()
        pool.check([])
    return rows | served(calls)


def served(calls: int) -> dict[str, float]:
    """Microseconds of calls that a checkout's core carries out by itself; there are none where it doesn't."""
    import numpy as np

    from kvfs.pages.pool import PagePool
    from kvfs.pages.table import PageTable
    from libsym.abi import Op
    from scheduler import _loop

    if not hasattr(_loop.lib, "sym_connection_serve"):
        return {}
    ffi, lib, rows, num_pages = _loop.ffi, _loop.lib, {}, 10_000
    for length, num_open in SERVED:
        pool = PagePool(Store(num_pages))
        pool.rows.grow(2 * num_open + 2)
        pool.core.row_room = 2 * num_open + 2
        account, base = pool.accounts.of(1000), PageTable(pool, 1000)
        room = base.reserve(np.arange(length))
        room.ready()
        room.commit_first(room.tokens)
        files = ffi.new("core_files *", {"num_names": 10**9})
        gate = ffi.new("sym_gate *", {"files": files})
        connection = ffi.new("sym_connection *", {"gate": gate, "holdings": account.holdings.core})
        connection.maker.account = account.core
        handle, answer = lib.sym_handle_new(connection, base.core), ffi.new("int64_t[4]")
        fork = ffi.new("sym_taken *", {"op": Op.KV_FORK, "handle": handle, "args": [0o600]})
        close = ffi.new("sym_taken *", {"op": Op.KV_CLOSE})

        def branch(connection=connection, fork=fork, close=close, answer=answer) -> bool:
            was_forked = lib.sym_connection_serve(connection, fork, ffi.NULL, answer)
            close.handle = answer[0]
            return was_forked and lib.sym_connection_serve(connection, close, ffi.NULL, answer)

        for _ in range(num_open):
            assert lib.sym_connection_serve(connection, fork, ffi.NULL, answer)
        assert branch()
        what = f"{length:,} entries, {num_pages:,} pages, {num_open:,} open: KV_FORK and KV_CLOSE"
        rows[what] = best_us(branch, calls)
        assert lib.sym_branches_close(connection, 2 * num_open) == num_open
        lib.sym_connection_free(connection)
        base.close()
        pool.check([])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a built checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(args.measure)))
        return
    trees = {"after": ROOT} | ({} if args.before is None else {"before": args.before.resolve()})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(1 if args.quick else args.rounds):
        for name, tree in sorted(trees.items(), reverse=bool(number % 2)):
            words = [tree / ".venv/bin/python", __file__, "--measure", str(100 if args.quick else CALLS)]
            told = subprocess.run(
                words, env=os.environ | {"PYTHONPATH": str(tree)}, cwd="/", check=True, stdout=subprocess.PIPE
            )
            found[name].append(json.loads(told.stdout))
    table = {
        row: {name: statistics.median(each[row] for each in turns) for name, turns in found.items() if row in turns[0]}
        for row in found["after"][0]
    }
    if args.json:
        print(json.dumps(table))
        return
    for row, us in table.items():
        before = "" if args.before is None else "   before       -"
        if "before" in us:
            before = f"   before {us['before']:7.1f} us   ratio {us['before'] / us['after']:5.1f}"
        print(f"{row:62} {us['after']:7.1f} us{before}")


if __name__ == "__main__":
    main()
