#!/usr/bin/env python3
"""The waits of a live daemon for calls about to come, beside the best fixed wait.

    .venv/bin/python scripts/bench/waits.py [--rounds 3] [--quick] [--json]

Plain loops over `pred()` think between two calls, for half to three halves of a mean. A set of turns chooses the best
fixed wait of each cell; another one compares that with the daemon's own decisions (`scheduler/batch/streams.c`), turn
by turn. A fixed wait ends as soon as all loops have called, which the daemon does not know. One daemon does both: see
waiting_daemon.py. `returns.py` replays the same without a daemon.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import tempfile
from pathlib import Path

from branching import THINK_MS, THINK_STREAMS, Found, Side, arguments, asked, parsed, sides

FIXED_MS = (0, 1, 2, 4, 6, 9, 13, 20)
AS_DUE = -1


class Waits:
    """A daemon, and the file that says how long its run waits."""

    def __init__(self, args: argparse.Namespace, side: Side, path: Path) -> None:
        self._args, self._side, self._path = args, side, path

    def turn(self, wait_ms: float, num_streams: int, think_ms: float) -> Found:
        with self._path.open("r+b") as file:  # the daemon has it mapped
            file.write(struct.pack("=2q", int(wait_ms * 1e6), num_streams))
        return self._side.turn(asked(self._args, "plain", num_streams, think_ms=think_ms))

    def beside_best(self, num_streams: int, think_ms: float, rounds: int) -> tuple[float, list[tuple[float, float]]]:
        """The best fixed wait in milliseconds; and rates with that one and with the daemon's, pair by pair."""
        waits_ms = FIXED_MS[:: 1 - len(FIXED_MS)] if self._args.quick else FIXED_MS
        turns = {wait_ms: self.turn(wait_ms, num_streams, think_ms) for wait_ms in waits_ms}
        if turns[FIXED_MS[-1]].calls_a_step < 1.1 * turns[FIXED_MS[0]].calls_a_step:
            raise SystemExit(f"steps that wait {FIXED_MS[-1]} ms hold no more calls: the run does not wait")
        best_ms = max(turns, key=lambda wait_ms: turns[wait_ms].tokens_per_s)
        pairs = []
        for number in range(rounds):
            order = (best_ms, AS_DUE)[:: 1 - 2 * (number % 2)]
            found = {wait: self.turn(wait, num_streams, think_ms).tokens_per_s for wait in order}
            pairs.append((found[best_ms], found[AS_DUE]))
        return best_ms, pairs


def main() -> None:
    parser = arguments(__doc__, "smollm2", THINK_STREAMS)
    args = parsed(parser)
    times_ms = THINK_MS[1:2] if args.quick else THINK_MS
    results = {}
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(bytes(16))
        with sides(args, {"": (Path(__file__).with_name("waiting_daemon.py"), path)}) as (side,):
            waits = Waits(args, side, path)
            print("Of each cell: tokens/s with the best fixed wait, that wait, and the daemon's share of that rate.")
            print(f"\n| think, ms | {' | '.join(map(str, times_ms))} |\n|---|{'---|' * len(times_ms)}")
            for num in args.streams:
                row = []
                for think_ms in times_ms:
                    best_ms, pairs = waits.beside_best(num, think_ms, 1 if args.quick else args.rounds)
                    share = statistics.median(own / best for best, own in pairs)
                    row.append(f"{statistics.median(best for best, _ in pairs):.0f}, {best_ms} ms, **{share:.2f}**")
                    results[f"{num} think {think_ms} ms"] = {"best_ms": best_ms, "pairs": pairs}
                print(f"| {num} streams | {' | '.join(row)} |", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
