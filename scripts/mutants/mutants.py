#!/usr/bin/env python3
"""Mutation testing: change the code in one small way at a time, and check whether a test fails.

The same seed and code give the same mutants. A mutant is caught if a test that runs its line fails within a minute, but
passes without the mutant. Tests that run the line in pytest's own process run first. Every mutant adds a row to a file,
and every file of tests adds a row to a map of lines. A later run continues from both files.

A mutant is laid over the checkout in a mount namespace of its own. The checkout does not change, and all processes and
mounts end with the tests. Needs root and GCC's binutils.

    scripts/mutants/mutants.py                                       # 80 mutants of the default paths
    scripts/mutants/mutants.py --num 20 --map kv.map --rows kv.rows --tests tests/kvfs -- kvfs/pages
    scripts/mutants/mutants.py --num 0                               # the map alone
    scripts/mutants/mutants.py --near --num 20 -- kvfs               # without a map
    scripts/mutants/mutants.py --summary                             # a summary of the existing rows

--near works without the map, which takes an hour to make. The tests of a mutant are then the files of tests beside its
module's own, as the folders of tests/ follow the folders of the code. So a survivor may be caught by tests that lie
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from changes import Mutant, chosen, mutants_of
from covered import Map
from overlay import HOUSE, Extension, extensions, pytest

PATHS = ["scheduler/batch", "scheduler/connection", "scheduler/core"]
PATHS += [f"scheduler/operations/{name}.py" for name in ("pred", "generate", "hot")]
LIMIT_S = 60
QUICK = {  # by file: its tests, and the text that a mutant replaces; the tests catch the mutant
    "scheduler/batch/cost.c": ("tests/scheduler/batch/test_cost_model.py", "+"),
    "scheduler/batch/deadlines.py": ("tests/scheduler/batch/test_deadlines.py", "self._expired(call)"),
}
VERDICTS = ("caught", "survived", "timed out", "not covered", "does not build")


def judged(mutant: Mutant, known: Map | Near, built: dict[str, list[Extension]]) -> tuple[str, str]:
    """Test a mutant. Return the verdict, such as "survived", and the test that failed."""
    try:
        if mutant.file.endswith(".c"):
            text = mutant.text()
            laid = {each.library: each.linked(source=mutant.file, text=text) for each in built[mutant.file]}
        else:
            compile(mutant.text(), mutant.file, "exec", dont_inherit=True)
            laid = {mutant.file: mutant.text()}
    except (SyntaxError, subprocess.CalledProcessError):
        return "does not build", ""
    tests, found = known.covering(mutant, LIMIT_S), ("not covered", "")
    while tests:
        found = tried(laid, tests)
        if not found[1].startswith("tests/") or tried({}, [found[1]])[0] == "survived":
            break
        if found[1] in tests:
            tests.remove(found[1])  # the test also fails without the mutant
        else:
            tests.append(f"--deselect={found[1]}")
    return found if tests else ("not covered", "")


def tried(laid: dict[str, bytes], tests: list[str]) -> tuple[str, str]:
    status, said = pytest(laid, ["-x", *tests], LIMIT_S)
    if status is None:
        return "timed out", ""
    if status == 0:
        return "survived", ""
    if status >= 128:
        return "caught", f"signal {status - 128}"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", said, re.MULTILINE)
    if failed is not None:
        return "caught", failed[1]
    gone = set(re.findall(r"^ERROR: not found: .*?/(tests/.*)$", said, re.MULTILINE))  # a mutant may rename tests
    left = [test for test in tests if test.partition("[")[0] not in gone]
    if left == tests:
        raise SystemExit(f"pytest ended with {status}, and names no test that failed:\n{said}")
    return tried(laid, left) if left else ("survived", "")


class Near:
    """The files of tests that lie nearest to a mutated file: first those of its module, then those of its folder."""

    def __init__(self, tests: list[str]) -> None:
        """`tests`: files and folders to choose from."""
        found = [file for path in map(Path, tests) for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        self._files = sorted(found)

    def covering(self, mutant: Mutant, limit_s: float) -> list[str]:
        """Return words for pytest: the files, nearest first, without slow tests. The time limit of a mutant ends the
        run, however many files there are.
        """
        assert limit_s > 0
        code = Path("tests") / mutant.file

        def distance(file: Path) -> tuple[int, bool, Path]:
            num_shared = len(os.path.commonpath([code.parent, file.parent]).split("/"))
            return -num_shared, file.stem != f"test_{code.stem}", file

        package = Path(*code.parts[:2])
        near = [str(file) for file in sorted(self._files, key=distance) if file.is_relative_to(package)]
        return ["-m", "not slow", *near]


def run(args: argparse.Namespace, rows: list[dict[str, Any]], place: Path) -> None:
    files = files_of(args.paths)
    known: Map | Near
    if args.near:
        known = Near(args.tests)
    else:
        known = Map(args.map, files)
        tests = [[path] if path.is_file() else sorted(path.rglob("test_*.py")) for path in map(Path, args.tests)]
        known.complete([str(path) for each in tests for path in each], place)
    built = extensions(files, place)
    if args.quick:
        wanted = [next(each for each in mutants_of(path) if each.old == QUICK[path][1]) for path in args.paths]
    else:
        wanted = chosen(files, args.num, args.seed)
    for mutant in wanted:
        about = {"file": mutant.file, "line": mutant.line, "begin": mutant.begin, "old": mutant.old, "new": mutant.new}
        if any(about.items() <= row.items() for row in rows):
            continue
        began_s = time.monotonic()
        verdict, by = judged(mutant, known, built)
        seconds = round(time.monotonic() - began_s, 1)
        rows.append({**about, "verdict": verdict, "by": by, "seconds": seconds})
        with args.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        said = f"{verdict} by {by}" if by else verdict
        print(f"{mutant.file}:{mutant.line}: {mutant.old!r} -> {mutant.new!r}: {said} in {seconds} s", flush=True)


def files_of(paths: list[str]) -> list[str]:
    """Return the Python and C files below these paths, without build files."""
    found = [file for path in map(Path, paths) for file in ([path] if path.is_file() else path.rglob("*.*"))]
    return sorted(str(file) for file in found if file.suffix in (".py", ".c") and not is_beside(file))


def is_beside(file: Path) -> bool:
    """Return whether a file is left out: build files, code generated from a header, examples."""
    return file.stem.endswith(("_build", "_abi")) or "examples" in file.parts


def summary(rows: list[dict[str, Any]]) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for package in (f"{Path(row['file']).parent}{' (C)' * row['file'].endswith('.c')}", "~ all"):
            counts[package][row["verdict"]] += 1
    print(f"{'':24}{''.join(f'{verdict:>16}' for verdict in VERDICTS)}  share caught")
    for package, found in sorted(counts.items()):
        share = found["caught"] / max(found.total() - found["does not build"], 1)
        print(f"{package:24}{''.join(f'{found[verdict]:16}' for verdict in VERDICTS)}  {share:.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", default=PATHS, help=f"files and packages ({' '.join(PATHS)})"
    )
    parser.add_argument("--seed", type=int, default=57)
    parser.add_argument("--num", type=int, default=80, help="how many mutants")
    parser.add_argument("--rows", type=Path, default=Path("/var/tmp/symphony-mutants.rows"))
    parser.add_argument("--map", type=Path, default=Path("/var/tmp/symphony-mutants.map"))
    parser.add_argument("--tests", nargs="+", default=["tests/scheduler", "tests/symphony"], help="files and folders")
    parser.add_argument("--near", action="store_true", help="without a map: the tests beside the mutant's module")
    parser.add_argument("--summary", action="store_true", help="summarise the rows by package")
    parser.add_argument(
        "--quick", action="store_true", help="one mutant in Python and one in C (or one of these files), to be caught"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.chdir(HOUSE)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        if args.quick:
            args.map, args.rows = Path(name) / "map", Path(name) / "rows"
            args.paths = args.paths if args.paths != PATHS else list(QUICK)
            args.tests = [QUICK[path][0] for path in args.paths]
        rows = [json.loads(row) for row in args.rows.read_text().splitlines()] if args.rows.exists() else []
        if not args.summary:
            run(args, rows, Path(name))
    summary(rows)
    return 1 if args.quick and any(row["verdict"] != "caught" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
