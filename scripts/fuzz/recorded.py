#!/usr/bin/env python3
"""Mutates frames that libsym really sent, and passes them to a daemon's gate in this process, without a socket.

PRED_BATCH and GENERATE are the most frequent. Every other operation that has arguments or a payload is mutated, too.
After each 2,000 frames no trace of them may be left: see `Fuzzer` in tests/scheduler/hostile.py. A run that fails
prints its seed, and the same seed repeats its frames.

First a part of the frames runs through a build of libsym's C under AddressSanitizer, UndefinedBehaviorSanitizer and
gcov, while Python's lines are traced. A table shows how many lines of the parsers and validators ran. Less than 90 % in
either language is a failure. `scripts/fuzz/frames.py --recorded` sends the same frames to a daemon process.

    scripts/fuzz/recorded.py                     # 10,000,000 frames, on every core
    scripts/fuzz/recorded.py --frames 1000000 --seed 7
    scripts/fuzz/recorded.py --quick             # some seconds; no lines are counted
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libsym.channel.server import Request

HOUSE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HOUSE))

BATCH = 20_000
"""Number of frames of one seed. To repeat a failure, all frames of its seed run again."""
QUICK, MEASURED = 20_000, 30_000
LEAST_SHARE = 0.9
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NATIVE = (
    *("channel/server.c", "channel/server_state.h", "channel/hot.c", "channel/ring.h"),
    *("rows/reducer.c", "rows/stops.c", "rows/sampler.c"),
)
"""Measured C files, below libsym/."""
TRACED: dict[str, tuple[str, ...]] = {
    "libsym/channel/server.py": ("ServerChannel.receive", "ServerChannel._known", "ServerChannel._reject"),
    "libsym/rows/reduced.py": ("RowReducer.__init__",),
    "libsym/rows/sampler.py": ("RowSampler.__init__", "sampling_block_bytes"),
    "libsym/rows/stops.py": ("StopTexts.__init__",),
    "scheduler/batch/attention.py": ("AnswerRoom", "AttentionMemory", "AttentionMass.__init__", "AttentionMass.begin"),
    "scheduler/batch/generation.py": ("Draft", "GenerateCall.__init__", "GenerateCall._new_generation"),
    "scheduler/batch/reduction.py": ("Reduction",),
    "scheduler/connection/under_way.py": (),
    "scheduler/doors/gate.py": ("Gate.handle", "Gate._begin", "_go_on"),
    "scheduler/wire/payloads.py": (),
    "scheduler/operations/advice.py": ("Advising._advise",),
    "scheduler/operations/assemble.py": (),
    "scheduler/operations/children.py": ("Children._list", "Children._spawn", "Children._wait", "Children._kill", "_"),
    "scheduler/operations/claims.py": ("Claiming._claim", "Claiming._name", "_owner_of"),
    "scheduler/operations/directories.py": ("Listing.list",),
    "scheduler/operations/generate.py": ("Generating", "_"),
    "scheduler/operations/kv.py": (),
    "scheduler/operations/messages.py": ("Mail.send", "Mail.recv", "Mail._addressee", "_topic"),
    "scheduler/operations/names.py": (),
    "scheduler/operations/pred.py": (),
    "scheduler/operations/text.py": ("Texts", "_chat_form"),
}
"""Measured Python files, and their functions that parse a program's input. Empty: all functions of the file."""


# ---- lines of C


def build(directory: Path) -> Path:
    """Build libsym's C half with sanitizers and gcov. Return the library's path."""
    from libsym.channel.channel_build import FOLDERS, ffi

    ffi.emit_c_code(str(directory / "_channel.c"))
    sources = [path for folder in FOLDERS for path in sorted(folder.glob("*.c")) if path.stem[0] != "_"]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g1", "-ffp-contract=off", "-Wno-psabi", "-fPIC", "--coverage"]
    flags += [*SANITIZED, *(f"-I{folder}" for folder in FOLDERS), f"-I{sysconfig.get_path('include')}"]
    compiler = os.environ.get("CC", "cc")
    units = [directory / "_channel.c", *sources]
    running = [subprocess.Popen([compiler, *flags, "-c", unit, "-o", directory / f"{unit.stem}.o"]) for unit in units]
    for each in running:
        if each.wait():
            raise SystemExit(f"the C does not compile: {each.args!r}")
    built = directory / "_channel.abi3.so"
    objects = [directory / f"{unit.stem}.o" for unit in units]
    linked: list[str | Path] = [compiler, "-shared", "--coverage", *SANITIZED, "-o", built, *objects]
    subprocess.run([*linked, "-lm", "-lpthread"], check=True)
    return built


def lines_of_c(directory: Path) -> dict[str, dict[int, int]]:
    """Return how often each line of each file of `NATIVE` ran."""
    found: dict[str, dict[int, int]] = {name: {} for name in NATIVE}
    command = ["gcov", "--json-format", "--stdout", *map(str, directory.glob("*.gcda"))]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=directory).stdout
    for report in out.splitlines():
        for file in json.loads(report)["files"]:
            counts = next((counts for name, counts in found.items() if file["file"].endswith(f"/libsym/{name}")), {})
            for line in file["lines"]:
                number = line["line_number"]
                counts[number] = counts.get(number, 0) + line["count"]
    return {f"libsym/{name}": counts for name, counts in found.items()}


# ---- lines of Python


class Lines:
    """Counts of the lines that this thread ran, for each file of `TRACED`."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[int, int]] = {name: dict.fromkeys(_lines_in(name), 0) for name in TRACED}
        self._of = {str(HOUSE / name): counts for name, counts in self.counts.items()}

    def trace(self, frame: FrameType, _event: str, _arg: object) -> Any:
        counts = self._of.get(frame.f_code.co_filename)
        if counts is None:
            return None
        lines = counts

        def local(frame: FrameType, _event: str, _arg: object) -> Any:
            if frame.f_lineno in lines:
                lines[frame.f_lineno] += 1
            return local

        return local(frame, "call", None)


def _lines_in(name: str) -> Iterator[int]:
    """Yield the lines of a file's functions. Other lines ran when the module was loaded."""
    path = HOUSE / name
    todo = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
    while todo:
        code = todo.pop()
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
        is_meant = not TRACED[name] or code.co_qualname.startswith(TRACED[name])
        if code.co_flags & 0x2 and is_meant:  # CO_NEWLOCALS: the code of a function
            yield from {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}


# ---- coverage of a part of the frames


def measure(directory: Path, num_frames: int, seed: int) -> None:
    """Send frames through the module that `build` made. Runs in a process of its own, whose normal exit gcov needs."""
    spec = importlib.util.spec_from_file_location("libsym._channel", directory / "_channel.abi3.so")
    assert spec is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    fuzzer, lines = new_fuzzer(recorded(), seed, computing=3), Lines()
    threading.settrace(lines.trace)  # for the worker processes, which read texts
    sys.settrace(lines.trace)
    try:
        fuzzer.run(num_frames)
    finally:
        sys.settrace(None)
    (directory / "lines.json").write_text(json.dumps(lines.counts))


def measured(num_frames: int, seed: int) -> list[str]:
    """Print the table of lines, with the lines that were not reached. Return the failures."""
    with tempfile.TemporaryDirectory(prefix="symphony-fuzz-") as name:
        directory = Path(name)
        build(directory)
        compiler = os.environ.get("CC", "cc")
        library = subprocess.run([compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
        environment = os.environ | {
            "LD_PRELOAD": library.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",  # without this, the sanitizer would report Python's own leaks at exit
            "PYTHONMALLOC": "malloc",  # gives each payload a block of its own
        }
        command = [sys.executable, __file__, "--measure", str(directory)]
        command += ["--frames", str(num_frames), "--seed", str(seed)]
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            return [f"seed {seed}: the sanitized run of {num_frames:,} frames failed: see above"]
        python = {
            name: {int(line): count for line, count in counts.items()}
            for name, counts in json.loads((directory / "lines.json").read_text()).items()
        }
        return [*table("C", lines_of_c(directory)), *table("Python", python)]


def table(language: str, found: dict[str, dict[int, int]]) -> list[str]:
    total = [0, 0]
    print(f"{'reached':>8} {'lines':>6}  share  {language}; not reached")
    for name, counts in found.items():
        missed = sorted(line for line, count in counts.items() if not count)
        lines, reached = len(counts), len(counts) - len(missed)
        total = [total[0] + reached, total[1] + lines]
        print(f"{reached:>8} {lines:>6} {reached / lines:>6.1%}  {name} {_ranges(missed)}")
    share = total[0] / total[1]
    print(f"{total[0]:>8} {total[1]:>6} {share:>6.1%}  all", flush=True)
    return [] if share >= LEAST_SHARE else [f"{share:.1%} of the lines of {language} were reached only"]


def _ranges(lines: list[int]) -> str:
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda each: each[1] - each[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ---- all frames


def recorded() -> list[Request]:
    from tests.scheduler.hostile import recorded_frames

    return recorded_frames()


def new_fuzzer(frames: list[Request], seed: int, **options: int) -> Any:
    from tests.scheduler.hostile import Fuzzer

    return Fuzzer(frames, seed, **options)


def run_seed(frames: list[Request], seed: int) -> tuple[int, Counter[int], str]:
    """Run one batch. Return the number of accepted frames, the answers by errno, and the failure as text."""
    fuzzer = new_fuzzer(frames, seed)
    try:
        fuzzer.run(BATCH)
    except BaseException as failure:  # noqa: BLE001 - any exception is a finding
        first = _first(failure)
        text = "".join(traceback.format_exception(first)[-6:])
        return fuzzer.num_frames, fuzzer.outcomes, f"seed {seed}, after {fuzzer.num_frames:,} frames: {text}"
    return fuzzer.num_frames, fuzzer.outcomes, ""


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


@contextmanager
def _progress(num_batches: int) -> Iterator[Any]:
    began_s = time.monotonic()

    def tell(done: int, num_frames: int) -> None:
        if sys.stderr.isatty() or done == num_batches:
            rate = num_frames / (time.monotonic() - began_s)
            print(f"\r{num_frames:,} frames, {rate:,.0f}/s", end="", file=sys.stderr, flush=True)

    yield tell
    print(file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutate recorded frames, and have a daemon's gate take them.")
    parser.add_argument("--frames", type=int, default=10_000_000, help="how many (default ten million)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first batch; each next batch adds one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} frames, and no lines are counted")
    parser.add_argument("--no-lines", action="store_true", help="count no lines, and sanitize nothing")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure, args.frames, args.seed)
        return 0
    failures = [] if args.quick or args.no_lines else measured(min(args.frames, MEASURED), args.seed)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr, flush=True)
    num_batches = 1 if args.quick else -(-args.frames // BATCH)
    outcomes: Counter[int] = Counter()
    num_frames = 0
    frames = recorded()
    seeds = range(args.seed, args.seed + num_batches)
    with ProcessPoolExecutor(args.jobs) as processes, _progress(num_batches) as tell:
        for done, (taken, answers, failure) in enumerate(processes.map(run_seed, [frames] * len(seeds), seeds), 1):
            num_frames += taken
            outcomes += answers
            if failure:
                failures.append(failure)
                print(f"FAILED {failure}", file=sys.stderr, flush=True)
            tell(done, num_frames)
    print(f"{num_frames:,} frames of {len(frames)} recorded ones; answers by errno:")
    for code, count in outcomes.most_common():
        print(f"{count:>12,}  {os.strerror(code) if code else 'done'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
