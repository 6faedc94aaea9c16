"""Scripts that try and measure, and where their quick forms are run."""

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

from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
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
STREAMS = ("--quick", "--model=tiny")
RATES = r" +[\d.]+ tokens/s +[\d.]+ to [\d.]+  [\w()]+( loop)? [\d.]+, ratio [\d.]+"

FORMS = {
    "bench/branching.py": Form(
        table=(
            r"2 branch: [\d.]+ of the plain rate, [\d.]+ of its calls a step",
            r"2 tasks, branch +[\d.]+",
            r"2 processes, branch +[\d.]+",
            r"2 beam, numbers +[\d.]+",
            r"beam +[\d.]+ s +\d+ steps +[\d.]+ ms",
        ),
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
    "bench/calls.py": Form(
        table=(
            *(
                rf"empty call, {load} daemon, 8 threads +[\d.]+ us .*daemon [\d.]+ us, program [\d.]+"
                for load in ("idle", "busy")
            ),
            r"round trip of fork_n\(32\) +[\d.]+ us",
            r"fork_n\(32\) and closed +[\d.]+ forks/s",
            r"a token by own loop +[\d.]+ us",
            *(rf"a token by {way} +[\d.]+ us .* own loop [\d.]+, ratio [\d.]+" for way in ("pred", "generate")),
        )
    ),
    "bench/crowd.py": Form(
        table=("40 generations", r"median [\d.]+, worst [\d.]+", r"calls under way after each: \d+ \d+")
    ),
    "bench/cost_model.py": Form(table=(r"\| bf16, \S+, \d+ threads \|( [\d.]+% \(\d+\) \|)+ \d+% \|",)),
    "bench/decoder.py": Form(
        ("--quick", "--roofline"),
        (
            r"Reads [\d.]+ GB/s; G operations/s: .*fma ",
            *(rf"\| ours-{each} \| \d+ \| \d+ \|" for each in ("float32", "bf16")),
            *(rf"\| ours-{each} \| [\d.]+, [\d.]+, \d+% \|" for each in ("float32", "bf16")),
            r"\| all \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \| [\d.]+ \| \d+% \|",
        ),
        (r"\| (?!all)\S+ \|.*", r"took at most.*"),
    ),
    "bench/disk.py": Form(
        ("--quick", "--model=tiny:positions=9000", "--only=history,small,restart,swaps"),
        (
            *(rf"connect, kv_open, pred {way}, 700 tokens +[\d.]+ ms " for way in ("after a restart", "from disk")),
            "fork and kv_sync, 64 threads +[\\d.]+ files/s ",
            "from exec to stat of a file +[\\d.]+ ms ",
            *(rf"swap-{way} of 64 MiB +[\d.]+ MB/s " for way in ("out", "in")),
        ),
    ),
    "bench/fleet.py": Form(
        table=(
            r"first token, 2,000 tokens, \d+ MB +[\d.]+ ms .* computed [\d.]+, ratio [\d.]+",
            r"first token, 1,000 of them new here +[\d.]+ ms",
            r"kv_fetch +[\d.]+ MB/s",
        )
    ),
    "bench/load.py": Form(
        table=(
            r"tiny.gguf, [\d.]+ GB, int4; \d+ cores",
            r"answer, first start, file on disk +[\d.]+ s",
            r"answer, next start, weights in memory +[\d.]+ s .* without [\d.]+, ratio",
            r"decode after the next start +[\d.]+ tokens/s .* without [\d.]+, ratio",
            r"PSS of one daemon +[\d.]+ MiB",
            r"PSS of each of two daemons +[\d.]+ MiB",
        ),
        may_be_empty=(r"0\.0 to 0\.\d",),
    ),
    "bench/placement.py": Form(
        ("--quick", "--machine=cpu", "--shrink=8", "--fetch"),
        (
            r"20 machines \(SmolLM2-135M .*\), [\d,]+ requests in 6 minutes, drawn conversations, .*",
            *(rf"{policy} +([\d.]+ % +){{3}}([\d.]+ +){{5}}\d+" for policy in ("placement", "least loaded", "random")),
        )
    ),
    "bench/shell.py": Form(
        table=tuple(
            rf"{command} beside C +[\d.]+ us .* C [\d.]+, ratio [\d.]+; ours [\d.]+ requests, processor [\d.]+ us; C .*"
            rf"\n{command} beside disk +[\d.]+ us .* disk [\d.]+, ratio [\d.]+"
            for command in ("create", "ls -l", "ls -l again", "stat", "find", "grep -r", "cp -r", "rm -r", "rsync -a")
        )
    ),
    "bench/mount.py": Form(
        table=tuple(
            rf"{what} +[\d.]+ us .*; the daemon's processor time [\d.]+ us"
            for what in (
                *("create and close", "list 100 names", "first read after a sync, MiB", "4 KiB appends"),
                *("random 4 KiB reads", r"write an image of [\d.]+ MB", r"read an image of [\d.]+ MB", "fork of .*"),
            )
        )
    ),
    "bench/launches.py": Form(
        ("--quick", "--isolation=standard"),
        (
            r"standard: first answer, warm +[\d.]+ ms",
            r"standard: `symphony run` +[\d.]+ ms .* `python` [\d.]+, ratio [\d.]+",
            r"launches of 8 at once +[\d.]+ a second",
            r"until 4 have called +[\d.]+ s .*; each: process \d+ KiB, the launcher -?\d+, the daemon -?\d+",
            r"until a killed program's pages are free +[\d.]+ ms",
            r"30 killed in their calls +[\d.]+ s .*; nothing stays, and \d+ rounds beside are right",
        ),
        (r"takes 0\.0 %", r"0\.0 to 0\.\d", r"(launcher|daemon) -?0\b"),
    ),
    "bench/limits.py": Form(table=(r"reads +[\d.]+ GB/s, 1 threads", r"fma avx2 +\d+ G operations/s")),
    "bench/programs.py": Form(
        ("--quick", "--model=tiny:positions=2560"),
        table=tuple(rf"{each} .* perplexity   \(without: [\d.e+]+\)" for each in ("windowed", "sink", "snapkv", "tova"))
    ),
    "bench/quality.py": Form(
        table=(r"\| Symphony int8 \| [\d.]+ \| [+-][\d.]+ % \| [\d.]+ % \|",),
    ),
    "bench/steps.py": Form(
        STREAMS,
        (
            *(rf"16 streams, {re.escape(way)}{RATES}" for way in ("pred()", "generate()", "stop texts", "JSON schema")),
            r"8 decodes beside prefills, p99 between tokens +[\d.]+ ms",
            r"prefills of 1,000 beside 8 decodes +[\d.]+ tokens/s",
            *(rf"equal accounts, {way}_for, max/min +[\d.]+ " for way in ("decode", "prefill")),
            r"weights 1:2, .* +[\d.]+ ",
        ),
        (
            *(r"others took \d+% to \d+%", r"\b0\.00 (wake-ups|ms)", "idle 0.00", r"0\.0 to"),
            r"p50 between tokens +0\.0 .*",  # several tokens arrive at once
            r", 0 of the plain loop",  # it may take less than the clock's tick
        ),
    ),
    "bench/workloads/compare.py": Form(
        ("--quick", "--model=tiny", "--only=shared,crowd", "--policies=lru"),
        tuple(
            rf"{case} +symphony-{side} +[\d.]+ +\d+ to \d+ +[\d.]+ "
            for case, side in (("shared", "bf16"), ("crowd all", "lru-ample"), ("crowd all", "lru-tenth"))
        ),
        (r" 0\.0+(?= )", r"others 0%", r" 0%\n", r"^  0 .*\n"),
    ),
    "bench/workloads/gateway.py": Form(
        ("--quick", "--model=tiny"),
        (
            r"2 clients +symphony-bf16 +[\d.]+ ",
            r"2 clients +gateway +[\d.]+ ",
            r"whole history +\d+ of \d+",
            r"conversation +\d+ of \d+",
            r"2  gateway +\d+ +[\d.]+ +\d+ +\d+ +[1-9]\d* +\d+ +\d+\n",
            r"alone +\d+ +\d+\nbeside 50 that stall +\d+ +\d+",
        ),
        (r" 0\.0+(?= )", r" 0%\n"),
    ),
    "conformance/odd_programs.py": Form(
        ("compact",),
        (
            "compact +zero +2  symphony run compact: argument",
            "compact +missing file +1  compact: none.kv: no such file",
            "compact +Ctrl-C +130",
            "held: 1 programs",
        ),
        (" 0  ", "'(0|nan)'"),
    ),
    "fuzz/frames.py": Form(
        table=("connections:", "frames:", "mutations:", "bytes searched:", "the gate took:", "honest rounds:"),
        may_be_empty=("daemon grew by MiB: 0", "more descriptors: 0", r"broken: \[\]"),
    ),
    "fuzz/core.py": Form(table=(r"20,000 operations agree with the model, [\d,]+ of them were refused",)),
    "fuzz/image_bytes.py": Form(
        table=(r"3,000 images: \d+ were whole", "image is damaged", "image is cut", "image has no")
    ),
    "mutants/mutants.py": Form(
        ("--quick", "scheduler/batch/cost.c"),
        (r"cost\.c:\d+: .*: caught by ", r"~ all +1( +0){4}  100%"),
        ("( +0){4}  100%",),
    ),
    "soak/crashes.py": Form(table=("kills  +2", "killed_while_starting +1", "operations", "syncs", "start_median_s")),
    "soak/fairness.py": Form(table=(r"10 loads, \d+ plans in",), may_be_empty=(": 0 broke a promise",)),
    "soak/fleet.py": Form(
        table=(
            "kills +2",
            "partitions +2",
            "pauses +1",
            "etcd kills +1",
            *(rf"{count} +\d+\n" for count in ("timed_out_without_etcd", "acknowledged", "reads_up_to_date", "names")),
        ),
        may_be_empty=(r"\nwrong +0",),
    ),
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


NEEDED = {"soak/fleet.py": ("etcd", "ip", "nsenter")}
"""Commands that a script needs beside those of every machine, by script."""


def skip_without_commands(name: str) -> None:
    """Skip a test of a script that needs commands, or namespaces, which this machine lacks."""
    missing = [each for each in NEEDED.get(name, ()) if shutil.which(each) is None]
    if missing or (name in NEEDED and subprocess.run(["unshare", "--net", "true"], check=False).returncode):
        pytest.skip(f"{name} NOT TRIED: there is no {', '.join(missing) or 'permission for network namespaces'}")


class Place:
    """Directory of a script's run: all processes and files of the run can be found by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, command: list[str | Path]) -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(self.path), "CC": str(ROOT / "tests/cc")}
        return Forked(
            command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def processes(self) -> Iterator[tuple[int, bytes]]:
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
