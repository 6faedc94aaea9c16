"""Map of coverage: the lines of the mutated files that each test runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sysconfig
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from changes import Mutant
from overlay import HOUSE, compiler, extensions, pytest

HERE = Path(__file__).resolve().parent
LIMIT_S = 300
"""Time limit of a file of tests. If the limit ends the tests of a file, the file's row has the tests that had passed by
then.
"""


@dataclass
class Test:
    name: str
    seconds: float
    here: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of the lines that the test runs in pytest's own process, by file."""
    elsewhere: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


class Map:
    """File of rows. The first row describes the code; each other row has the passed tests of one file of tests."""

    def __init__(self, path: Path, files: list[str]) -> None:
        self._path, self._files = path, files
        self.tests: dict[str, list[Test]] = {}
        self.blocks: dict[str, list[int]] = {}
        """Lines of C at which a basic block begins. Each other line belongs to the block before it."""
        if path.exists():
            first, *rows = map(json.loads, path.read_text().splitlines())
            if first["of"] != _digest(*files):
                raise SystemExit(f"{path} is of other code: remove it, or name another with --map")
            self.blocks = first["blocks"]
            for row in rows:
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        if row["of"] == _digest(row["file"]):
            self.tests[row["file"]] = [Test(**test) for test in row["tests"]]

    def complete(self, files: list[str], place: Path) -> None:
        """Run the files of tests that have no row yet."""
        missing = [file for file in files if file not in self.tests]
        if not missing:
            return
        noting = _Noting(self._files, place)
        with self._path.open("a") as rows:
            if rows.tell() == 0:
                self.blocks = noting.begins()
                rows.write(json.dumps({"of": _digest(*self._files), "blocks": self.blocks}) + "\n")
            for file in missing:
                began_s = time.monotonic()
                tests, last = noting.tests_of(file)
                row = {"file": file, "of": _digest(file), "tests": [vars(test) for test in tests]}
                rows.write(json.dumps(row) + "\n")
                rows.flush()
                self._take(row)
                print(f"{file}: {len(tests)} tests in {time.monotonic() - began_s:.0f} s: {last}", flush=True)

    def covering(self, mutant: Mutant, limit_s: float) -> list[str]:
        """Return the tests that run a mutant's line. Tests that run it in pytest's process come first, and in each
        group quick tests come before slow ones.

        The limit applies to the sum of recorded seconds of each group. Recording lines about doubles these times.
        """
        here, elsewhere = list[tuple[float, str]](), list[tuple[float, str, str, float]]()
        for file, tests in self.tests.items():
            here += [(test.seconds, test.name) for test in tests if self._runs(mutant, test.here)]
            rest = [test for test in tests if self._runs(mutant, test.elsewhere) and not self._runs(mutant, test.here)]
            least_s = min((test.seconds for test in rest), default=0)
            elsewhere += [(least_s, file, test.name, test.seconds) for test in rest]  # its tests may share a daemon
        elsewhere.sort(key=lambda each: each[:2])
        found = list[str]()
        for group in (sorted(here), [(seconds, name) for *_, name, seconds in elsewhere]):
            ends_s = accumulate(seconds for seconds, _ in group)
            found += [name for (seconds, name), end_s in zip(group, ends_s, strict=True) if end_s - seconds < limit_s]
        return found

    def _runs(self, mutant: Mutant, lines: dict[str, list[int]]) -> bool:
        found, first_line = lines.get(mutant.file, []), mutant.first_line
        if not mutant.is_in_function:
            return bool(found)
        if blocks := self.blocks.get(mutant.file):
            first_line = blocks[bisect_right(blocks, mutant.line) - 1]
        return any(first_line <= line <= mutant.line for line in found)


def _digest(*files: str) -> str:
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


class _Noting:
    """Runs tests and records what they run: lines of Python (seen.py), and basic blocks of C (seen.c)."""

    def __init__(self, files: list[str], place: Path) -> None:
        self._place = Path(tempfile.mkdtemp(dir=place))
        for each in (place, self._place):
            each.chmod(0o755)
        wanted = [str(HOUSE / file) for file in files]
        begin = f"import mutants_seen; mutants_seen.begin({str(self._place)!r}, {wanted!r})\n"
        packages = Path(sysconfig.get_path("purelib")).relative_to(HOUSE)
        self._laid = {f"{packages}/mutants_seen.pth": begin.encode()}
        self._laid[f"{packages}/mutants_seen.py"] = (HERE / "seen.py").read_bytes()
        self._blocks: dict[tuple[str, str], tuple[str, int]] = {}
        """File and line of each block, by library and address."""
        built = extensions(files, self._place, "-O0", "-g", "-fsanitize-coverage=trace-pc")
        for library, extension in {each.library: each for those in built.values() for each in those}.items():
            seen, linked = f"{self._place}/seen.o", self._place / "linked.so"
            names = [f'-DPLACE="{self._place}"', f'-DLIBRARY="{library}"']
            compiler("-fPIC", "-O2", "-D_GNU_SOURCE", *names, "-c", str(HERE / "seen.c"), "-o", seen)
            self._laid[library] = extension.linked(seen)
            linked.write_bytes(self._laid[library])
            self._blocks |= {(library, address): line for address, line in _blocks_of(linked)}

    def begins(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for file, line in sorted(set(self._blocks.values())):
            found[file].append(line)
        return found

    def tests_of(self, file: str) -> tuple[list[Test], str]:
        """Return the tests of a file that passed, and pytest's last line, or that the file was stopped."""
        for name in ("now", "tests", "lines", "blocks"):
            (self._place / name).write_bytes(bytes(8) if name == "now" else b"")
            (self._place / name).chmod(0o666)  # some processes belong to other users
        status, said = pytest(self._laid, [file, "-p", "mutants_seen", f"--timeout={LIMIT_S}"], LIMIT_S)
        tests = {number: Test(*about) for number, *about in map(json.loads, (self._place / "tests").open())}
        for is_here, number, name, line in sorted(set(self._noted())):
            if number in tests:
                (tests[number].here if is_here else tests[number].elsewhere)[name].append(line)
        last = f"stopped after {LIMIT_S} s" if status is None else said.strip().rpartition("\n")[2]
        return list(tests.values()), last

    def _noted(self) -> Iterator[tuple[bool, int, str, int]]:
        for row in (self._place / "lines").open():
            is_here, number, name, line = row.split(" ")
            yield is_here == "1", int(number), str(Path(name).relative_to(HOUSE)), int(line)
        for row in (self._place / "blocks").open():
            is_here, number, library, address = row.split()
            if (library, address) in self._blocks:
                yield is_here == "1", int(number), *self._blocks[library, address]


def _blocks_of(library: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the basic blocks: the return address of each block's call to seen.c, and the block's file and line."""
    listing = _said("objdump", "-d", "--no-show-raw-insn", str(library))
    calls = re.findall(r"call +\w+ <__sanitizer_cov_trace_pc.*\n +(\w+):", listing)
    asked = "".join(f"{int(each, 16) - 1:x}\n" for each in calls)
    lines = _said("addr2line", "-e", str(library), asked=asked).splitlines()
    for address, line in zip(calls, lines, strict=True):
        if found := re.match(rf"{HOUSE}/(.*):(\d+)", line):
            yield address, (os.path.normpath(found[1]), int(found[2]))


def _said(*command: str, asked: str = "") -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, input=asked).stdout
