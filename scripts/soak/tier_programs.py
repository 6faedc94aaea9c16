#!/usr/bin/env python3
"""Run many programs with pauses, on a daemon with memory for a tenth of their files. Results must not depend on memory.

First some programs are killed while they wait. Then the daemon is killed during the programs' work, and the next daemon
is shut down cleanly. All synced files must exist afterwards. The exit status is 1 if anything differs.

Run as a user who may mount, with the repository's interpreter: .venv/bin/python scripts/soak/tier_programs.py
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tier_crowd import Crowd, Said, check_what_was_synced  # noqa: E402 - the path comes first

from tests.symphony.daemons import Daemon  # noqa: E402

TIMEOUT_S = 600
PAGE_BYTES = 8192
"""Size in bytes of a page of the tiny model in bf16."""
PAGES_A_PROGRAM = 10
KILLED_EACH = 8
"""Of this number of programs, one is killed."""
MOVES = ("num_in", "num_out", "num_dropped", "num_waits", "wait_s", "num_resumes")
"""Counters of the tiers that are printed for the run with little memory."""


class Soak:
    """Daemons on one state, one after another."""

    def __init__(self, directory: Path, num_programs: int, num_rounds: int, pause_s: float) -> None:
        self._directory = directory
        self._num_programs, self._num_rounds, self._pause_s = num_programs, num_rounds, pause_s
        self._enough = num_programs * PAGES_A_PROGRAM * 4 * PAGE_BYTES
        self._tenth = max(16, num_programs * PAGES_A_PROGRAM // 10) * PAGE_BYTES

    def daemon(self, memory: int) -> Daemon:
        return Daemon(self._directory, "--model", "tiny", "--kv-memory", str(memory))

    def crowd(self, daemon: Daemon, num_rounds: int) -> Crowd:
        return Crowd(daemon, self._num_programs, num_rounds, self._pause_s)

    def same_results(self) -> None:
        """Compare the results of two runs: with enough memory for all files, and with memory for a tenth of them. Some
        programs are killed at random moments.
        """
        found: list[list[Said]] = []
        killed = set(random.sample(range(self._num_programs), max(1, self._num_programs // KILLED_EACH)))
        for memory in (self._enough, self._tenth):
            daemon = self.daemon(memory)
            try:
                begun_s = time.monotonic()
                crowd = self.crowd(daemon, self._num_rounds)
                for number in killed if memory == self._tenth else ():
                    time.sleep(random.uniform(0, 1))
                    crowd.end(number)
                found.append(crowd.wait(TIMEOUT_S))
                took_s = time.monotonic() - begun_s
                daemon.symphony("doctor")
                moves = {name: value for name, value in daemon.stat()["tiers"].items() if name in MOVES and value}
                print(f"{memory >> 10} KiB: {took_s:.1f} s, moves {json.dumps(moves)}", flush=True)
                daemon.shell(f"rm {daemon.mount}/*.kv")
                assert daemon.stop() == 0
            finally:
                daemon.clean_up()
        for number, (wanted, said) in enumerate(zip(*found, strict=True)):
            assert wanted.result, f"program {number} has said nothing"
            assert said.result == wanted.result or number in killed, f"program {number} computed something else"

    def restarts(self) -> None:
        """Kill a daemon in the middle of its programs' work, and shut the next one down cleanly.

        Check the synced files each time.
        """
        daemon = self.daemon(self._tenth)
        try:
            crowd = self.crowd(daemon, 1000)
            crowd.until_each_has_synced(2)
            time.sleep(random.uniform(0, 2))
            daemon.stop(signal.SIGKILL)
            said = crowd.wait(TIMEOUT_S, may_fail=True)
        finally:
            daemon.clean_up()
        for way in ("a kill", "an end in order"):
            daemon = self.daemon(self._tenth)
            try:
                num_same = check_what_was_synced(daemon, said)
                daemon.symphony("doctor")
                print(f"after {way}: {num_same} of {len(said)} files have what was synced last", flush=True)
                assert daemon.stop() == 0
            finally:
                daemon.clean_up()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="of each program")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two of its calls, at most")
    parser.add_argument("--quick", action="store_true", help="four programs, one round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.programs, arguments.rounds, arguments.pause = 4, 1, 0.1
    with tempfile.TemporaryDirectory(prefix="tier-programs-") as base:
        soak = Soak(Path(base), arguments.programs, arguments.rounds, arguments.pause)
        try:
            soak.same_results()
            soak.restarts()
        except AssertionError as error:
            print(f"wrong: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
