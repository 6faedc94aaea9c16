"""Scripts that try and measure, and where their quick forms are run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 280

MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 20),
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="NO SCRIPT TRIED: needs root, to be several users and to mount"),
]


@dataclass(frozen=True)
class Form:
    """A script's quick form. Every number that it prints is one of its cells."""

    words: tuple[str, ...] = ("--quick",)
    table: tuple[str, ...] = ()
    """Contents of the table, as patterns."""
    may_be_empty: tuple[str, ...] = ()
    """Cells that say that nothing went wrong, as patterns."""


TENTH = r"128 KiB: \d+\.\d s, moves {"
MOVES = r"(\"\w+\": [\d.]+(, |})){5,6}"
STREAMS = ("--quick", "--only=streams", "--model=tiny", "--precision=int8", "--rounds=1", "--patience=0", "--tries=1")
RATES = r" +[\d.]+ tokens/s +[\d.]+ to [\d.]+  plain loop [\d.]+, ratio [\d.]+"

PLAIN_CALLS = tuple(
    rf"{what} +[\d.]+ +[\d.]+\n"
    for what in (
        *(f"{call}, MiB" for call in ("new", "first read after a sync", "read again", "overwrites")),
        "sync",
        *(f"4 KiB {call}" for call in ("overwrites after a sync", "overwrites again", "appends")),
        *(f"random 4 KiB reads{when}" for when in ("", ", first after a sync")),
    )
)

FORMS = {
    "bench/branching.py": Form(
        table=(
            r"2 branch: [\d.]+ of the plain rate, [\d.]+ of its calls a step",
            r"2 tasks, branch +[\d.]+",
            r"ahead +[\d.]+",
            r"beam +[\d.]+ s +\d+ steps +[\d.]+ ms",
        ),
    ),
    "bench/branching_peers.py": Form(
        table=(
            *(rf"2 {way}, symphony +[\d.]+ .*\n2 {way}, gateway +[\d.]+" for way in ("branch", "plain", "streamed")),
            *(rf"{name}, gateway +[\d.]+ s +\d+ tokens" for name in ("beam", "best_of_n", "tree_of_thought", "mcts")),
            r"mcts: [\d.]+ times as fast as gateway",
            r"start of a program: [\d.]+ s",
        ),
        may_be_empty=("others took up to 0%",),
    ),
    "bench/ceiling.py": Form(
        table=tuple(
            rf"2 {way}, {kind}, 0.2 ms{wanted}"
            for kind in ("threads", "processes")
            for way, wanted in (
                ("plain", r"( +[\d.]+){3} +- +[\d.]+ +-( +[\d.]+){3}\n"),
                ("branch", r"( +[\d.]+){9}\n"),
                ("branch", r": [\d.]+ of the plain rate, [\d.]+ of its calls a step"),
            )
        ),
    ),
    "bench/crowds/crowd.py": Form(
        table=("40 generations", r"median [\d.]+, worst [\d.]+", r"calls under way after each: \d+ \d+")
    ),
    "bench/crowds/handshakes.py": Form(
        table=(r"\d+ before, \d+ at most", r"\d+ creates .*: none failed", r"a first pred\(\) after [\d.]+ s")
    ),
    "bench/crowds/large_requests.py": Form(
        table=tuple(rf"1,000 {what}: \d+ MB .*, \d+ MB .*, \d+ MB after" for what in ("locks", r"pred\(\)s"))
    ),
    "bench/crowds/many_tasks.py": Form(
        table=(r"of 500 failed in [\d.]+ s; 500 got a token",), may_be_empty=("0 of 500 failed",)
    ),
    "bench/crowds/never_back.py": Form(
        table=(
            r"plain +the loops get [\d.]+ calls/s \(p99 [\d.]+ ms\), the other threads [\d.]+",
            r"once +the loops get [\d.]+ calls/s \(p99 [\d.]+ ms\), the other threads [\d.]+",
            r"never +the loops get [\d.]+ calls/s \(p99 [\d.]+ ms\), the other threads [\d.]+",
            r"the loops get [\d.]+ of that beside plain loops",
            r"the loops get [\d.]+ of that beside threads that nobody expects",
        ),
    ),
    "bench/crowds/stats.py": Form(
        table=(r"(?s)(a stat each .*p50.*p99.*stats.*){2}(stats without a pause.*p50.*p99.*stats.*){2}",)
    ),
    "bench/plain_files.py": Form(table=(r"summed in \d+ us", *PLAIN_CALLS)),
    "bench/waits.py": Form(table=(r"2 streams \| [\d.]+, \d+ ms, \*\*[\d.]+\*\*",), may_be_empty=(r", 0 ms",)),
    "bench/kills.py": Form(
        table=('"median":', '"worst":', '"killed": 16', '"seconds":', '"rounds beside":', '"doctor": "clean"'),
        may_be_empty=('"what stays": {}', '"rounds that differ": 0'),
    ),
    "bench/requests_beside.py": Form(
        table=(
            "`guided_json` obeyed",
            "`frobnicate` named",
            r"refused: temprature is no field: is temperature meant\?",
            "symphony .*the generation ends",
        ),
        may_be_empty=(r'"temp\w+": 0',),
    ),
    "bench/returns.py": Form(
        table=(
            r"\| 32 (\| \d+, [\d.]+ ms, \*\*[01]\.\d\d\*\* ){5}\|",
            r"\| 64 (\| \d+, [\d.]+ ms, \*\*[01]\.\d\d\*\* ){4}\|",
        ),
        may_be_empty=(r"\d+, 0 ms",),
    ),
    "bench/steps.py": Form(
        STREAMS,
        tuple(rf"64 streams, {re.escape(way)}{RATES}" for way in ("pred()", "generate()", "stop texts")),
        ("load up to 0.0", r"others took \d+% to \d+%"),
    ),
    "conformance/odd_programs.py": Form(
        table=(
            "completion +nonsense +0  .",
            "completion +too long +1  completion: .* beyond the model's context",
            "compact +zero +2  symphony run compact: argument",
            "compact +missing file +1  compact: none.kv: no such file",
            "compact +Ctrl-C +130",
            "held: 2 programs",
        ),
        may_be_empty=(" 0  ", "'(0|nan)'"),
    ),
    "fuzz/frames.py": Form(
        table=("connections:", "frames:", "mutations:", "bytes searched:", "the gate took:", "honest rounds:"),
        may_be_empty=("daemon grew by MiB: 0", "more descriptors: 0", r"broken: \[\]"),
    ),
    "bench/core.py": Form(
        table=tuple(
            rf"{length} entries, [\d,]+ pages, [\d,]+ open: {call} +[\d.]+ us"
            for length in ("1", "32", "297", "7,000")
            for call in ("fork and close", "branch", "append and cut")
        )
        + tuple(
            rf"{length} entries, 10,000 pages, {num} open: KV_FORK and KV_CLOSE +[\d.]+ us"
            for length in ("32", "7,000")
            for num in ("1", "10,000")
        ),
    ),
    "fuzz/core.py": Form(table=(r"20,000 operations agree with the model, [\d,]+ of them were refused",)),
    "fuzz/images.py": Form(table=("3,000 images: \\d+ were whole", "image is damaged", "image is cut", "image has no")),
    "mutants/mutants.py": Form(
        table=(r"cost\.c:\d+: .*: caught by ", r"deadlines\.py:\d+: .*: caught by ", r"~ all +2( +0){4}  100%"),
        may_be_empty=("( +0){4}  100%",),
    ),
    "soak/crashes.py": Form(table=("kills  +2", "killed_while_starting +1", "operations", "syncs", "start_median_s")),
    "soak/fairness.py": Form(table=(r"10 loads, \d+ plans in",), may_be_empty=(": 0 broke a promise",)),
    "soak/forks.py": Form(table=("forks +1000", "threads", "forks_per_s", "free_pages_after", "resident_bytes_after")),
    "soak/powercuts.py": Form(table=("10 states, 0 wrong",), may_be_empty=(", 0 wrong",)),
    "soak/service.py": Form(
        table=('"syncs":', '"ended_by_sigterm": 2', '"ended_by_sigkill": 1', '"had_full_disk": true', '"held_s":'),
        may_be_empty=(r'"leaks": \[\]', '"processor_s": 0.0,'),
    ),
    "soak/tier_programs.py": Form(
        table=(TENTH + MOVES, "after a kill: 4 of 4", "after an end in order: 4 of 4"),
        may_be_empty=(r"1280 KiB: \d+\.\d s, moves {}",),
    ),
    "soak/tiers.py": Form(
        table=("append", "fork", "remove", "truncate", "num_in", "num_out", "num_waits", "trouble: ", "sync"),
        may_be_empty=(", 0 directories wrong",),
    ),
}  # fmt: skip


class Place:
    """Where a script works: all that it starts and leaves can be found by this path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, command: list[str | Path]) -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(self.path)}
        return subprocess.Popen(
            command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def processes(self) -> Iterator[tuple[int, bytes]]:
        """Processes that inherited this place, and their words."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"TMPDIR={self.path}\0".encode() in (process / "environ").read_bytes():
                    yield int(process.name), (process / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue

    def mounts(self) -> list[str]:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [point for point in points if point.startswith(str(self.path))]

    def kill_daemon(self, script: subprocess.Popen[str]) -> None:
        """Once it serves, and a little later."""
        until_s = time.monotonic() + 60
        while not (daemons := [pid for pid, words in self.processes() if b"\0serve\0" in words]) or not any(
            " - fuse" in line and str(self.path) in line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ):
            assert script.poll() is None, "it has ended before its daemon was there"
            assert time.monotonic() < until_s, "it starts no daemon"
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(daemons[0], signal.SIGKILL)

    def clear(self) -> None:
        for pid, _ in self.processes():
            os.kill(pid, signal.SIGKILL)
        for point in reversed(self.mounts()):
            subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(self.path)


@pytest.fixture(name="place")
def a_place() -> Iterator[Place]:
    place = Place(Path(tempfile.mkdtemp(prefix="q-")))  # short: sockets lie below it
    place.path.chmod(0o755)
    yield place
    place.clear()
