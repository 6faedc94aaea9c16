#!/usr/bin/env python3
"""Fork and remove files on a daemon from many threads. All pages must be free again at the end.

Each round forks a file, with or without a name for the fork. Both share the last page of the file. The round appends to
the fork, which copies that page, or cuts the fork. Then it removes the fork. Sometimes the daemon's memory is measured,
which must not grow.

Run as a user who may mount, with the repository's interpreter:
.venv/bin/python scripts/soak/forks.py --count 200000
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import libsym as sym  # noqa: E402 - the path comes first

NUM_BASES = 4
BASE_TOKENS = 1000
"""Tokens of each forked file. They do not fill the last page."""
MAX_GROWTH = 8 << 20
"""Largest growth of memory in the second half, in bytes. Free lists and arenas may grow; forks must leave nothing."""


class Soak:
    """State that the threads of a run share."""

    def __init__(self, num_threads: int, count: int) -> None:
        self.num_threads = num_threads
        self.count = count
        self.bases = [sym.kv_create(f"base{index}.kv") for index in range(NUM_BASES)]
        for index, base in enumerate(self.bases):
            sym.kv_write(base, [index + 1] * BASE_TOKENS)
        self.errors: list[BaseException] = []
        self.daemon = sym.daemon_stat()["pid"]

    def run(self) -> dict[str, float | int]:
        self._work(self.count // 2)  # afterwards memory is at its maximum, with the longest journal of names
        free, resident = self._free(), self._resident()
        start = time.perf_counter()
        self._work(self.count - self.count // 2)
        taken_s = time.perf_counter() - start
        return {
            "forks": self.count,
            "threads": self.num_threads,
            "forks_per_s": round((self.count - self.count // 2) / taken_s),
            "free_pages_before": free,
            "free_pages_after": self._free(),
            "resident_bytes_before": resident,
            "resident_bytes_after": self._resident(),
        }

    def _work(self, count: int) -> None:
        share = -(-count // self.num_threads)
        threads = [
            threading.Thread(target=self._guarded, args=(number, share), daemon=True)
            for number in range(self.num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _guarded(self, number: int, count: int) -> None:
        try:
            for turn in range(count):
                self._round(number, turn)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            self.errors.append(error)

    def _round(self, number: int, turn: int) -> None:
        base = self.bases[(number + turn) % NUM_BASES]
        path = f"fork{number}.kv" if turn % 2 else None
        fork = sym.kv_fork(base, path)
        if turn % 8 == 0:
            sym.kv_write(fork, [number + 1])
        elif turn % 8 == 3:
            sym.kv_truncate(fork, 40)
            second = sym.kv_fork(fork)
            sym.kv_write(second, [7])
            second.close()
        sym.kv_remove(fork)

    def _free(self) -> int:
        free: int = sym.daemon_stat()["num_free_pages"]
        return free

    def _resident(self) -> int:
        return int(Path(f"/proc/{self.daemon}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def failures(result: dict[str, float | int]) -> list[str]:
    """Return messages about failed expectations."""
    found = []
    if result["free_pages_after"] != result["free_pages_before"]:
        found.append(f"{result['free_pages_before']} pages were free, now {result['free_pages_after']}")
    growth = result["resident_bytes_after"] - result["resident_bytes_before"]
    if growth > MAX_GROWTH:
        found.append(f"the daemon has grown by {growth} bytes")
    return found


def soak(base: Path, num_threads: int, count: int) -> dict[str, float | int]:
    """Start a daemon, run the soak, and end the daemon by SIGTERM."""
    socket = base / "symphony.sock"
    places: list[str | Path] = ["--mount", base / "kv", "--state", base / "state", "--socket", socket]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "symphony", "serve", "--model", "tiny", "--kv-memory", "64M", *places],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert daemon.stdout is not None
    try:
        line = daemon.stdout.readline()
        if not line.startswith("symphony: "):
            raise SystemExit("the daemon did not start")
        sym.connect(socket)
        result = Soak(num_threads, count).run()
        sym.close()
    finally:
        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(60)
        if status:  # the daemon's mount would prevent the removal of the directory
            subprocess.run(["fusermount3", "-uzq", base / "kv"], check=False)
    if status:
        raise SystemExit(f"the daemon ended with status {status}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Fork and remove files, and see that nothing is lost.")
    parser.add_argument("--count", type=int, default=200_000, help="forks (default 200000)")
    parser.add_argument("--threads", type=int, default=8, help="threads that fork (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="1000 forks")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.count = 1000
    with tempfile.TemporaryDirectory(prefix="symphony-soak-") as name:
        result = soak(Path(name), arguments.threads, arguments.count)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:22} {value}" for key, value in result.items()))
    wrong = failures(result)
    print("\n".join(wrong) or "nothing is lost", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
