"""After a power cut everything is there that was synced, and of the rest whatever a disk may keep."""

import hashlib
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disk.log import (
    ROOT,
    Allocated,
    Changed,
    Log,
    Made,
    Marked,
    Operation,
    Punched,
    Removed,
    Renamed,
    Resized,
    Settled,
    Synced,
    Written,
)
from tests.disk.powercut import SECTOR_BYTES, State, materialize, states
from tests.disk.recorder import Disk, available

needs_disk = pytest.mark.skipif(bool(available()), reason=available())


class Script:
    """A log that is written by hand. Files are numbered from 2 in the order in which they are made."""

    def __init__(self) -> None:
        self._operations: list[Operation] = [Settled()]
        self._data = bytearray()
        self._files: dict[str, int] = {"": ROOT}

    @property
    def log(self) -> Log:
        return Log(tuple(self._operations), memoryview(bytes(self._data)))

    def make(self, path: str, mode: int = stat.S_IFREG | 0o600, target: str = "") -> None:
        above, _, name = path.rpartition("/")
        self._files[path] = ROOT + 1 + sum(isinstance(operation, Made) for operation in self._operations)
        self._add(Made(path, self._files[path], self._files[above], name, mode, os.getuid(), os.getgid(), target))

    def mkdir(self, path: str) -> None:
        self.make(path, stat.S_IFDIR | 0o700)

    def write(self, path: str, offset: int, data: bytes) -> None:
        self._add(Written(path, self._files[path], offset, len(data), len(self._data)))
        self._data += data

    def resize(self, path: str, size: int) -> None:
        self._add(Resized(path, self._files[path], size))

    def allocate(self, path: str, size: int) -> None:
        self._add(Allocated(path, self._files[path], 0, size, keep_size=False))

    def punch(self, path: str, offset: int, size: int) -> None:
        self._add(Punched(path, self._files[path], offset, size))

    def chmod(self, path: str, mode: int) -> None:
        self._add(Changed(path, self._files[path], stat.S_IFREG | mode, os.getuid(), os.getgid()))

    def sync(self, path: str, **how) -> None:
        self._add(Synced(path, self._files[path], len(self._operations), **how))

    def rename(self, path: str, new: str) -> None:
        (above, _, name), (new_above, _, new_name) = path.rpartition("/"), new.rpartition("/")
        other = self._files.get(new)
        file = self._files[new] = self._files.pop(path)
        self._add(Renamed(path, file, self._files[above], name, new, self._files[new_above], new_name, other))

    def remove(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        self._add(Removed(path, self._files.pop(path), self._files[above], name))

    def _add(self, operation: Operation) -> None:
        self._operations.append(operation)


@pytest.fixture
def ends(tmp_path):
    """Return a function: the set of `look`'s results over the trees that a script may leave, for many seeds."""

    def run(script: Script, look: Callable[[Path], object], *, count: int = 60, **how) -> set[object]:
        seen = set()
        for seed in range(count):
            materialize(State(script.log, len(script.log), seed, **how), tmp_path / "after")
            seen.add(look(tmp_path / "after"))
        return seen

    return run


def tree(top: Path) -> tuple[tuple[str, bytes | None], ...]:
    found = sorted(top.rglob("*"))
    return tuple((str(path.relative_to(top)), None if path.is_dir() else path.read_bytes()) for path in found)


def content(name: str) -> Callable[[Path], bytes | None]:
    return lambda top: (top / name).read_bytes() if (top / name).exists() else None


# Bytes


def test_what_was_synced_is_there_and_what_was_not_may_be(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"1" * 512)
    script.sync("a")
    script.write("a", 0, b"2" * 512)
    assert ends(script, content("a")) == {b"1" * 512, b"2" * 512}
    script.sync("a")
    assert ends(script, content("a")) == {b"2" * 512}


def test_a_later_write_may_be_there_without_an_earlier_one(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"--" * 512)
    script.sync("a")
    script.write("a", 0, b"1" * 512)
    script.write("a", 512, b"2" * 512)
    kinds = {value[:1] + value[-1:] for value in ends(script, content("a"))}
    assert kinds == {b"--", b"1-", b"-2", b"12"}


def test_a_write_is_torn_between_sectors_alone(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, bytes(5000))
    script.sync("a")
    script.write("a", 100, b"x" * 4800)
    seen = ends(script, content("a"))
    assert len(seen) > 5
    for value in seen:
        assert len(value) == 5000
        for start in range(0, 5000, SECTOR_BYTES):
            sector = value[max(start, 100) : min(start + SECTOR_BYTES, 4900)]
            assert set(sector) in ({0}, {ord("x")})


def test_a_version_that_was_overwritten_does_not_come_back_over_a_newer_one(ends):
    script = Script()
    script.make("a")
    for value in (b"1", b"2", b"3"):
        script.write("a", 0, value * 512)
    script.sync("a")
    script.write("a", 0, b"4" * 512)
    assert ends(script, content("a")) == {b"3" * 512, b"4" * 512}


def test_a_write_that_syncs_itself_covers_no_other(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"-" * 1024)
    script.sync("a")
    script.write("a", 0, b"1" * 512)
    script.write("a", 512, b"2" * 512)
    script.sync("a", first=len(script.log) - 1)
    assert ends(script, content("a")) == {b"-" * 512 + b"2" * 512, b"1" * 512 + b"2" * 512}
    script.sync("a")
    assert ends(script, content("a")) == {b"1" * 512 + b"2" * 512}


def test_a_sync_covers_its_own_file_alone(ends):
    script = Script()
    for name in "ab":
        script.make(name)
        script.write(name, 0, name.encode() * 512)
    script.sync("")
    script.sync("b")
    assert ends(script, content("b")) == {b"b" * 512}
    assert {b"", b"a" * 512} < ends(script, content("a"))


def test_bytes_that_are_missing_below_the_size_are_zeros_or_garbage(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"1" * 4096)
    script.write("a", 4096, b"2" * 4096)
    script.sync("")
    zeros = ends(script, content("a"), holes="zeros")
    assert {len(value) for value in zeros} == {0, 4096, 8192}
    assert {byte for value in zeros for byte in value} == set(b"12\0")
    garbage = ends(script, content("a"), holes="garbage")
    assert len({byte for value in garbage for byte in value}) > 200


def test_what_was_allocated_is_no_garbage(ends):
    script = Script()
    script.make("a")
    script.allocate("a", 8192)
    script.sync("a")
    script.write("a", 0, b"1" * 8192)
    script.sync("")
    seen = ends(script, content("a"), holes="garbage")
    assert {byte for value in seen for byte in value} == set(b"1\0")
    assert {len(value) for value in seen} == {8192}


def test_after_a_sync_that_failed_a_good_one_covers_only_what_is_new(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"-" * 1024)
    script.sync("a")
    script.write("a", 0, b"1" * 512)
    script.sync("a", failed=True)
    script.write("a", 512, b"2" * 512)
    script.sync("a")
    assert ends(script, content("a")) == {b"-" * 512 + b"2" * 512, b"1" * 512 + b"2" * 512}
    script.write("a", 0, b"1" * 512)
    script.sync("a")
    assert ends(script, content("a")) == {b"1" * 512 + b"2" * 512}


def test_a_truncation_that_is_lost_takes_what_was_written_behind_it_along(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"old" * 512)
    script.sync("a")
    script.resize("a", 0)
    script.write("a", 0, b"new" * 512)
    seen = ends(script, content("a"), holes="zeros")
    assert {b"old" * 512, b"new" * 512, b""} <= seen
    assert all(b"o" not in value or value == b"old" * 512 for value in seen)


def test_a_hole_that_is_not_synced_is_there_or_not(ends):
    script = Script()
    script.make("a")
    script.write("a", 0, b"x" * 12288)
    script.sync("a")
    script.punch("a", 4096, 4096)
    assert ends(script, content("a")) == {b"x" * 12288, b"x" * 4096 + bytes(4096) + b"x" * 4096}
    script.sync("a")
    assert ends(script, content("a")) == {b"x" * 4096 + bytes(4096) + b"x" * 4096}


def test_a_mode_is_like_bytes(ends):
    script = Script()
    script.make("a")
    script.sync("a")
    script.chmod("a", 0o640)
    assert ends(script, lambda top: stat.S_IMODE((top / "a").stat().st_mode)) == {0o600, 0o640}
    script.sync("a", data_only=True)
    assert ends(script, lambda top: stat.S_IMODE((top / "a").stat().st_mode)) == {0o600, 0o640}
    script.sync("a")
    assert ends(script, lambda top: stat.S_IMODE((top / "a").stat().st_mode)) == {0o640}


# Names


def test_names_are_lost_from_the_end_and_never_before_a_sync(ends):
    script = Script()
    script.mkdir("d")
    script.make("d/a")
    script.sync("d")
    script.make("b")
    script.rename("d/a", "d/c")
    trees = {
        (("d", None), ("d/a", b"")),
        (("b", b""), ("d", None), ("d/a", b"")),
        (("b", b""), ("d", None), ("d/c", b"")),
    }
    assert ends(script, tree) == trees


def test_syncing_a_new_file_covers_its_name_but_no_later_one(ends):
    script = Script()
    script.mkdir("d")
    script.make("d/new")
    script.rename("d/new", "d/final")
    script.sync("d/final")
    assert ends(script, tree) == {(("d", None), ("d/new", b"")), (("d", None), ("d/final", b""))}
    script.sync("d")
    assert ends(script, tree) == {(("d", None), ("d/final", b""))}


def test_a_strict_disk_keeps_a_new_name_only_when_its_directory_is_synced(ends):
    script = Script()
    script.make("a")
    script.sync("a")
    assert ends(script, tree, strict=True) == {(), (("a", b""),)}
    script.sync("")
    assert ends(script, tree, strict=True) == {(("a", b""),)}


def test_a_strict_disk_loses_names_out_of_order_but_renames_atomically(ends):
    script = Script()
    script.make("a")
    script.make("b")
    script.sync("")
    script.rename("a", "c")
    script.remove("b")
    names = ends(script, lambda top: "".join(sorted(path.name for path in top.iterdir())), strict=True)
    assert names == {"ab", "bc", "a", "c"}


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(ends):
    script = Script()
    for name in ("a", "a.new"):
        script.make(name)
        script.write(name, 0, name.encode())
        script.sync(name)
    script.sync("")
    script.rename("a.new", "a")
    trees = {(("a", b"a"), ("a.new", b"a.new")), (("a", b"a.new"),)}
    assert ends(script, tree) == trees
    assert ends(script, tree, strict=True) == trees


def test_links_and_other_kinds_of_files_come_back(tmp_path):
    script = Script()
    script.make("l", stat.S_IFLNK | 0o777, "a/b")
    script.make("pipe", stat.S_IFIFO | 0o600)
    script.sync("")
    materialize(State(script.log, len(script.log), 0), tmp_path / "after")
    assert (tmp_path / "after" / "l").readlink() == Path("a/b")
    assert (tmp_path / "after" / "pipe").is_fifo()


# States


def test_the_same_seed_gives_the_same_states_and_trees(tmp_path):
    script = Script()
    for name in "abcdef":
        script.make(name)
        script.write(name, 0, os.urandom(9999))
        script.sync(name)
        script.write(name, 512, os.urandom(9999))
    log = script.log
    first, second = list(states(log, 1, 20)), list(states(log, 1, 20))
    assert first == second != list(states(log, 2, 20))
    for state in first:
        losses = materialize(state, tmp_path / "one")
        assert materialize(state, tmp_path / "two") == losses
        assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_losses_say_what_is_missing(tmp_path):
    script = Script()
    script.make("a")
    script.write("a", 0, b"x")
    lost = materialize(State(script.log, len(script.log), 0, keep="none"), tmp_path / "after")
    assert [loss.operation.path for loss in lost] == ["a"]
    assert materialize(State(script.log, len(script.log), 0, keep="all"), tmp_path / "after") == []
    assert (tmp_path / "after" / "a").read_bytes() == b"x"


def test_cuts_lie_behind_the_mark(tmp_path):
    script = Script()
    script.make("a")
    log = Log((*script.log.operations, Marked("ready"), *[Synced("a", 2, 1)] * 9), memoryview(b""))
    cuts = {state.cut for state in states(log, 0, 200, after="ready")}
    assert cuts == set(range(log.place_of("ready") + 1, len(log) + 1))
    assert all(state.marks == ["ready"] for state in states(log, 0, 20, after="ready"))


# What is real


def sqlite_keeps_its_word(tmp_path: Path, *, synchronous: str, strict: bool) -> bool:
    """Whether every commit that it acknowledged is there after 50 power cuts."""
    with Disk(tmp_path) as disk:
        index = sqlite3.connect(disk.path / "index.db", isolation_level=None)
        index.execute("PRAGMA locking_mode = EXCLUSIVE")
        index.execute("PRAGMA journal_mode = WAL")
        index.execute(f"PRAGMA synchronous = {synchronous}")
        index.execute("PRAGMA wal_autocheckpoint = 10")
        index.execute("CREATE TABLE t (a INTEGER, b BLOB)")
        disk.mark("0")
        for number in range(1, 60):
            index.execute("BEGIN")
            index.execute("DELETE FROM t WHERE a < ?", (number - 20,))
            index.execute("INSERT INTO t VALUES (?, ?)", (number, os.urandom(3000)))
            index.execute("COMMIT")
            disk.mark(str(number))
        index.close()
        log = disk.log()
    num_lost = 0
    for state in states(log, 7, 50, strict=strict):
        num_lost += len(materialize(state, tmp_path / "after"))
        if not is_whole(tmp_path / "after" / "index.db", max((int(mark) for mark in state.marks), default=-1)):
            return False
    assert num_lost > 20
    return True


def is_whole(path: Path, promised: int) -> bool:
    index = sqlite3.connect(path, isolation_level=None)
    try:
        if index.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
            return False
        if promised < 0:
            return True
        (last,) = index.execute("SELECT coalesce(max(a), 0) FROM t").fetchone()
        rows = index.execute("SELECT a FROM t ORDER BY a").fetchall()
        return last in (promised, promised + 1) and rows == [(a,) for a in range(max(1, last - 20), last + 1)]
    except sqlite3.DatabaseError:
        return False
    finally:
        index.close()


@needs_disk
@pytest.mark.parametrize("strict", [False, True])
def test_sqlite_keeps_every_commit_that_it_acknowledged(tmp_path, strict):
    """SQLite's word is as good as any, so this is a test of the power cuts: they lose nothing that a disk may not."""
    assert sqlite_keeps_its_word(tmp_path, synchronous="FULL", strict=strict)


@needs_disk
@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_sqlite_that_does_not_sync_is_caught(tmp_path, synchronous):
    assert not sqlite_keeps_its_word(tmp_path, synchronous=synchronous, strict=False)


@needs_disk
@pytest.mark.parametrize("slip", ["no sync of the file", "no sync of the directory", "synced behind the rename"])
def test_a_wrong_way_to_replace_a_file_is_caught(tmp_path, slip):
    assert replaced_wrongly(tmp_path, slip)


@needs_disk
def test_the_right_way_to_replace_a_file_is_not(tmp_path):
    assert not replaced_wrongly(tmp_path, "")


def replaced_wrongly(tmp_path: Path, slip: str) -> bool:
    """Whether some state has neither the last content that was acknowledged nor the next one."""
    contents = [os.urandom(6000) for _ in range(10)]

    def replace(path: Path, content: bytes) -> None:
        with (path / "a.new").open("wb", buffering=0) as file:
            file.write(content)
            if slip not in ("no sync of the file", "synced behind the rename"):
                os.fsync(file)
            (path / "a.new").rename(path / "a")
            if slip == "synced behind the rename":
                os.fsync(file)
        if slip != "no sync of the directory":
            directory = os.open(path, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    with Disk(tmp_path) as disk:
        for number, value in enumerate(contents):
            replace(disk.path, value)
            disk.mark(str(number))
        log = disk.log()
    for state in states(log, 3, 100, after="0"):
        materialize(state, tmp_path / "after")
        last = int(state.marks[-1])
        path = tmp_path / "after" / "a"
        if not path.exists() or path.read_bytes() not in contents[last : last + 2]:
            return True
    return False


@needs_disk
def test_a_state_that_loses_nothing_is_what_lies_below(tmp_path):
    """The log is whole: played to its end it gives the directory that it was recorded from."""
    with Disk(tmp_path) as disk:
        (disk.path / "d").mkdir()
        for number in range(20):
            path = disk.path / "d" / f"{number}"
            with path.open("w+b", buffering=0) as file:
                for place in range(5):
                    file.seek(place * 3000)
                    file.write(os.urandom(2000 + number))
                file.truncate(9000 + number)
                os.posix_fallocate(file.fileno(), 0, 12000)
            if number % 3 == 0:
                path.rename(disk.path / f"r{number}")
            elif number % 3 == 1:
                (disk.path / f"l{number}").hardlink_to(path)
        (disk.path / "d" / "2").rename(disk.path / "d" / "5")
        log = disk.log()
    for strict in (False, True):
        losses = materialize(State(log, len(log), 1, keep="all", strict=strict), tmp_path / "after")
        assert losses == []
        assert tree(tmp_path / "after") == tree(tmp_path / "lower")


@pytest.mark.slow
def test_a_hundred_states_of_50_mb_hold_what_was_written_or_nothing(tmp_path):
    script = Script()
    script.make("slots")
    script.make("wal")
    block = hashlib.shake_128(b"").digest(65536)
    for number in range(700):
        script.write("slots", number * 65536, block)
        for place in range(5):
            script.write("wal", (number * 5 + place) % 1000 * 4096, block[:4096])
        script.sync("wal")
        script.sync("slots")
    log = script.log
    sectors = {block[at : at + 512] for at in range(0, len(block), 512)} | {bytes(512)}
    lengths = set[int]()
    for number, state in enumerate(states(log, 1, 100)):
        materialize(state, tmp_path / "after")
        if number % 20 == 0 and (tmp_path / "after/slots").exists():
            data = (tmp_path / "after/slots").read_bytes()
            lengths.add(len(data))
            assert {data[at : at + 512] for at in range(0, len(data), 512)} <= sectors
    assert len(lengths) > 1
