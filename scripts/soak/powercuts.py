#!/usr/bin/env python3
"""Simulate power cuts of a daemon's disk. Each start afterwards must bring all promised files back.

Each random workload runs on a disk that records all writes. From the record the script makes states that the disk may
have after a power cut, and opens the storage of a daemon on each. --ext4 gives the number of states with a real ext4,
on a loop device over the recording disk. On these states, ext4 replays its journal before the storage opens. A state
with ext4 needs root, and takes a second or two.

Run with the repository's interpreter: .venv/bin/python scripts/soak/powercuts.py --schedules 1000 --ext4 200
Failures are printed with their seeds. Threads are not deterministic, so repeat a seed several times: --first SEED
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from libsym.errors import SymError  # noqa: E402 - the path comes first
from tests.disk import block  # noqa: E402
from tests.disk.powercut import State, materialize, states  # noqa: E402
from tests.disk.recorder import Disk  # noqa: E402
from tests.kvfs.durable.model import Model  # noqa: E402
from tests.kvfs.durable.powercuts import READY, judge, killed_life, recorded_life  # noqa: E402


@contextmanager
def fast_directory() -> Iterator[Path]:
    """Yield a temporary directory, in memory if possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="powercuts-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


class Soak:
    """Counts the states, and prints failures."""

    def __init__(self, num_steps: int, *, stops: bool) -> None:
        self.num_steps = num_steps
        self.num_judged = self.num_failed = 0
        self._stops = stops

    def directory(self, seed: int, count: int) -> None:
        """Simulate power cuts below a directory. Every second workload follows a killed daemon. In every third workload
        the disk sometimes fails.
        """
        with fast_directory() as base:
            with Disk(base) as disk:
                before = killed_life(disk.path / "state", seed, self.num_steps // 2) if seed % 2 else None
                model = recorded_life(disk.path / "state", disk, seed, self.num_steps, before, has_faults=seed % 3 == 0)
                log = disk.log()
            for number, state in enumerate(states(log, seed, count, after=READY)):
                materialize(state, base / "after")
                self._judge(model, state, base / "after/state", f"--first {seed} --steps {self.num_steps}, {number}")

    def ext4(self, seed: int, count: int) -> None:
        """Simulate power cuts below a real ext4."""
        with fast_directory() as base:
            with block.Ext4(base) as ext4:
                model = recorded_life(ext4.path / "state", ext4.disk, seed, self.num_steps)
                log = ext4.disk.log()
            (base / "after").mkdir()
            for number, state in enumerate(states(log, seed, count, after=READY)):
                with block.mounted(state, base / "after") as path:
                    self._judge(
                        model, state, path / "state", f"--ext4 --first {seed} --steps {self.num_steps}, {number}"
                    )

    def _judge(self, model: Model, state: State, directory: Path, what: str) -> None:
        self.num_judged += 1
        try:
            judge(model, state, directory)
        except (AssertionError, SymError, ExceptionGroup) as error:
            self.num_failed += 1
            print(f"{what}: cut at {state.cut} with seed {state.seed}, {state.keep} kept:\n{_innermost(error)}")
            if self._stops:
                kept = Path(tempfile.mkdtemp(prefix="powercut-state-"))
                shutil.copytree(directory, kept / "state")
                raise SystemExit(f"the state is in {kept}; it was opened once since") from error


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="states of a directory")
    parser.add_argument("--ext4", type=int, default=0, help="states of an ext4")
    parser.add_argument("--first", type=int, default=0, help="seed of the first workload")
    parser.add_argument("--steps", type=int, default=150, help="of a workload")
    parser.add_argument("--states", type=int, default=25, help="of each workload")
    parser.add_argument("--keep", action="store_true", help="stop at the first failure, and keep that state")
    parser.add_argument("--quick", action="store_true", help="two short workloads of a directory, one of an ext4")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.schedules, arguments.ext4, arguments.steps, arguments.states = 8, 2, 60, 4
    logging.disable()
    if arguments.ext4 and (why := block.available()):
        raise SystemExit(why)
    soak, start_s = Soak(arguments.steps, stops=arguments.keep), time.monotonic()
    for wanted, cut in ((arguments.schedules, soak.directory), (arguments.ext4, soak.ext4)):
        for number in range(-(-wanted // arguments.states)):
            cut(arguments.first + number, min(arguments.states, wanted - number * arguments.states))
    print(f"{soak.num_judged} states, {soak.num_failed} wrong, {time.monotonic() - start_s:.1f} s")
    return 1 if soak.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
