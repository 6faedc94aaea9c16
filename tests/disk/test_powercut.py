"""After a power cut everything is there that was synced, and of the rest whatever a disk may keep."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.disk.allocation import punch
from tests.disk.log import (
    ROOT,
    Allocated,
    Log,
    Made,
    Marked,
    Operation,
    Punched,
    Removed,
    Renamed,
    Settled,
    Synced,
    Written,
)
from tests.disk.powercut import SECTOR_BYTES, State, materialize, states
from tests.disk.recorder import Disk, available

needs_disk = pytest.mark.skipif(bool(available()), reason=available())


class Script:
    """A log that is written by hand, in words: `make a, write a 0 12, sync a`.

    Files are numbered from 2 in the order in which they are made. Each letter that is written fills a sector.
    """

    def __init__(self, steps: str) -> None:
        self._operations: list[Operation] = [Settled()]
        self._data = bytearray()
        self._files: dict[str, int] = {"": ROOT}
        for step in steps.split(", "):
            word, *arguments = step.split(" ")
            getattr(self, word)(*arguments)

    @property
    def log(self) -> Log:
        return Log(tuple(self._operations), memoryview(bytes(self._data)))

    def make(self, path: str, mode: int = stat.S_IFREG | 0o600) -> None:
        above, _, name = path.rpartition("/")
        self._files[path] = ROOT + 1 + sum(isinstance(operation, Made) for operation in self._operations)
        self._add(Made(path, self._files[path], self._files[above], name, mode, os.getuid(), os.getgid()))

    def mkdir(self, path: str) -> None:
        self.make(path, stat.S_IFDIR | 0o700)

    def write(self, path: str, sector: str, letters: str) -> None:
        data = b"".join(letter.encode() * SECTOR_BYTES for letter in letters)
        self.write_bytes(path, int(sector) * SECTOR_BYTES, data)

    def write_bytes(self, path: str, offset: int, data: bytes) -> None:
        self._add(Written(path, self._files[path], offset, len(data), len(self._data)))
        self._data += data

    def allocate(self, path: str, size: str) -> None:
        self._add(Allocated(path, self._files[path], 0, int(size), keep_size=False))

    def punch(self, path: str, sector: str, count: str) -> None:
        self._add(Punched(path, self._files[path], int(sector) * SECTOR_BYTES, int(count) * SECTOR_BYTES))

    def sync(self, path: str, how: str = "") -> None:
        self._add(Synced(path, self._files[path], len(self._operations), how == "data", how == "fails"))

    def rename(self, path: str, new: str) -> None:
        (above, _, name), (new_above, _, new_name) = path.rpartition("/"), new.rpartition("/")
        file = self._files[new] = self._files.pop(path)
        self._add(Renamed(path, file, self._files[above], name, new, self._files[new_above], new_name))

    def remove(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        self._add(Removed(path, self._files.pop(path), self._files[above], name))

    def _add(self, operation: Operation) -> None:
        self._operations.append(operation)


def ends(log: Log, look: Callable[[Path], object], directory: Path, **how: Any) -> set[Any]:
    """Results of `look` over the trees that a log may leave, for many seeds."""
    seen = set[Any]()
    for seed in range(60):
        materialize(State(log, len(log), seed, **how), directory / "after")
        seen.add(look(directory / "after"))
    return seen


def content(top: Path) -> bytes | None:
    return (top / "a").read_bytes() if (top / "a").exists() else None


def letters(top: Path) -> str | None:
    """A letter for each sector of the file a."""
    data = content(top)
    return None if data is None else data[::SECTOR_BYTES].replace(b"\0", b"0").decode()


def tree(top: Path) -> str:
    return " ".join(f"{path.relative_to(top)}{'/' * path.is_dir()}" for path in sorted(top.rglob("*")))


def whole_tree(top: Path) -> list[tuple[str, bytes | None]]:
    found = sorted(top.rglob("*"))
    return [(str(path.relative_to(top)), None if path.is_dir() else path.read_bytes()) for path in found]


X, HOLE = "x" * 24, "x" * 8 + "0" * 8 + "x" * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ("make a, write a 0 1, sync a, write a 0 2", {"1", "2"}),
        ("make a, write a 0 1, sync a, write a 0 2, sync a", {"2"}),
        # A later write may be there without an earlier one.
        ("make a, write a 0 --, sync a, write a 0 1, write a 1 2", {"--", "1-", "-2", "12"}),
        # A version that was overwritten does not come back over a newer one.
        ("make a, write a 0 1, write a 0 2, write a 0 3, sync a, write a 0 4", {"3", "4"}),
        # After a sync that failed a good one covers only what is new.
        ("make a, write a 0 --, sync a, write a 0 1, sync a fails, write a 1 2, sync a", {"-2", "12"}),
        ("make a, write a 0 --, sync a, write a 0 1, sync a fails, write a 1 2, sync a, write a 0 1, sync a", {"12"}),
        # A sync covers its own file alone.
        ("make a, write a 0 1, sync a, write a 0 2, make b, write b 0 3, sync b", {"1", "2"}),
        # A hole that is not synced is there or not.
        (f"make a, write a 0 {X}, sync a, punch a 8 8", {X, HOLE}),
        (f"make a, write a 0 {X}, sync a, punch a 8 8, sync a", {HOLE}),
    ],
)
def test_bytes_that_were_synced_are_there_and_others_may_be(steps, left, tmp_path):
    assert ends(Script(steps).log, letters, tmp_path) == left


D = "mkdir d, make d/a, sync d"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "left"),
    [
        # Names are lost from the end, and never before a sync.
        (f"{D}, make b, rename d/a d/c", {"d/ d/a", "b d/ d/a", "b d/ d/c"}),
        ("make a, make b, sync , rename a c, remove b", {"a b", "b c", "c"}),
        # Syncing a new file covers its name but no later one.
        ("mkdir d, make d/new, rename d/new d/final, sync d/final", {"d/ d/new", "d/ d/final"}),
        ("mkdir d, make d/new, rename d/new d/final, sync d/final, sync d", {"d/ d/final"}),
    ],
)
def test_names_that_were_synced_are_there_and_others_may_be(steps, left, tmp_path):
    assert ends(Script(steps).log, tree, tmp_path) == left


def test_a_write_is_torn_between_sectors_alone(tmp_path):
    script = Script("make a, write a 0 0000000000, sync a")
    script.write_bytes("a", 100, b"x" * 4800)
    seen = ends(script.log, content, tmp_path)
    assert len(seen) > 5
    for value in seen:
        assert len(value) == 5120
        for start in range(0, 5120, SECTOR_BYTES):
            sector = value[max(start, 100) : min(start + SECTOR_BYTES, 4900)]
            assert set(sector) in ({ord("0")}, {ord("x")}, set())


def test_bytes_that_are_missing_below_the_size_are_zeros_or_garbage_but_where_they_were_allocated(tmp_path):
    ones, twos = "1" * 8, "2" * 8
    log = Script(f"make a, write a 0 {ones}, write a 8 {twos}, sync ").log
    zeros = ends(log, content, tmp_path, holes="zeros")
    assert {len(value) for value in zeros} == {0, 4096, 8192}
    assert {byte for value in zeros for byte in value} == set(b"12\0")
    garbage = ends(log, content, tmp_path, holes="garbage")
    assert len({byte for value in garbage for byte in value}) > 200
    log = Script(f"make a, allocate a 8192, sync a, write a 0 {ones}, write a 8 {ones}, sync ").log
    found = ends(log, letters, tmp_path, holes="garbage")
    assert {letter for value in found for letter in value} == {"0", "1"}
    assert {len(value) for value in found} == {16}


def test_cuts_lie_behind_the_mark():
    log = Log((*Script("make a").log.operations, Marked("ready"), *[Synced("a", 2, 1)] * 9), memoryview(b""))
    cuts = {state.cut for state in states(log, 0, 200, after="ready")}
    assert cuts == set(range(log.place_of("ready") + 1, len(log) + 1))
    assert all(state.marks == ["ready"] for state in states(log, 0, 20, after="ready"))


@pytest.mark.slow
@needs_disk
@pytest.mark.parametrize("slip", ["", "no sync of the file", "no sync of the directory", "synced behind the rename"])
def test_a_wrong_way_to_replace_a_file_is_caught_and_what_loses_nothing_is_what_lies_below(tmp_path, slip):
    """Whether some state has neither the last content that was acknowledged nor the next one."""
    contents = [os.urandom(6000) for _ in range(6)]
    with Disk(tmp_path) as disk:
        for number, value in enumerate(contents):
            with (disk.path / "a.new").open("wb", buffering=0) as file:
                file.write(value)
                if slip not in ("no sync of the file", "synced behind the rename"):
                    os.fsync(file)
                (disk.path / "a.new").rename(disk.path / "a")
                if slip == "synced behind the rename":
                    os.fsync(file)
            if slip != "no sync of the directory":
                directory = os.open(disk.path, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
            disk.mark(str(number))
        with (disk.path / "other").open("w+b", buffering=0) as file:
            for size in (9000, 200):
                file.write(os.urandom(size))
                file.truncate(7000)
                os.posix_fallocate(file.fileno(), 0, 12000)
                punch(file.fileno(), 4096, 4096)
        log = disk.log()
    path = tmp_path / "after" / "a"

    def is_right(state: State) -> bool:
        materialize(state, tmp_path / "after")
        last = int(state.marks[-1])
        return path.exists() and path.read_bytes() in contents[last : last + 2]

    assert all(map(is_right, states(log.until(log.place_of("5") + 1), 3, 60, after="0"))) == (not slip)
    materialize(State(log, len(log), 1, keep="all"), tmp_path / "after")
    assert whole_tree(tmp_path / "after") == whole_tree(tmp_path / "lower")
