"""Reads an index that may be damaged in any way: a copy of it, row by row, and all that can still be read.

Nothing of the state is written. SQLite would write even for a reader: it recovers the log into shared memory beside it,
and takes it in when it closes. So it gets a copy of the two files, in memory where there is room: what they say of
prompts is nobody's business.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvfs.durable.index import APPLICATION_ID, FORMAT_VERSION, Index, Row
from kvfs.durable.log_check import has_lost_commits
from kvfs.durable.migrations import MIGRATIONS
from kvfs.durable.records import Broken
from libsym.errors import Invalid, SymError

Key: TypeAlias = tuple[object, ...]

_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of its own is made in it
_MAX_BARREN = 400
"""Scans of a table, one after the other, that find nothing: then nothing more is looked for. A tenth of a second."""
_PAGE_BYTES = 4096
_NAME_BITS = 64
_WITHOUT_ROWID = {b"\2", b"\x0a"}
"""How a page of such a table begins."""
_AS_FORMAT_4 = "DROP TABLE sums; PRAGMA user_version=4;"
_AS_FORMAT_3 = "DROP TABLE sums; DROP TABLE xattrs; PRAGMA user_version=3; PRAGMA auto_vacuum=0; VACUUM;"
_ROOT_PAGE, _MAP_ENTRY_BYTES = 1, 5
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, and how its keys lie on a line: to look for what is sound behind damage."""

    name: str
    key: str
    low: Key
    high: Key
    """Behind the last one."""
    num_key_columns: int
    to_number: Callable[[Key], int]
    from_number: Callable[[int], Key]
    after: Callable[[Key], Key]
    """The least key behind one."""


def _by_number(name: str, key: str) -> _Table:
    most = 1 << 62
    return _Table(
        name, key, (-most,), (most,), 1, lambda key: _whole(key[0]), lambda at: (at,), lambda key: (_whole(key[0]) + 1,)
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _name_number(key: Key) -> int:
    name = key[1] if isinstance(key[1], bytes) else b""
    return _whole(key[0]) << _NAME_BITS | int.from_bytes(name[:8].ljust(8, b"\0"))


def _name_key(at: int) -> Key:
    return at >> _NAME_BITS, (at & (1 << _NAME_BITS) - 1).to_bytes(8)


def _name_after(key: Key) -> Key:
    return key[0], (key[1] if isinstance(key[1], bytes) else b"") + b"\0"


def _slot_number(key: Key) -> int:
    return (_whole(key[0]) << 31) + _whole(key[1])


def _slot_key(at: int) -> Key:
    return at >> 31, at & (1 << 31) - 1


def _slot_after(key: Key) -> Key:
    return key[0], _whole(key[1]) + 1


_ABOUT = _Table("about", "key", ("",), ("\U0010ffff",), 1, lambda _: 0, lambda _: ("",), lambda key: (f"{key[0]}\0",))
_NAMES = _Table("names", "directory, name", (0, b""), (1 << 62, b""), 2, _name_number, _name_key, _name_after)
_SLOTS = _Table("slots", "identity, slot", (0, 0), (1 << 31, 0), 2, _slot_number, _slot_key, _slot_after)
TABLES = {
    "about": _ABOUT,
    "identities": _by_number("identities", "id"),
    "inodes": _by_number("inodes", "number"),
    "versions": _by_number("versions", "number"),
    "names": _NAMES,
    "slots": _SLOTS,
    "xattrs": _by_number("xattrs", "number"),
    "sums": _Table("sums", "number, part", (0, 0), (1 << 62, 0), 2, _slot_number, _slot_key, _slot_after),
}
_OF_ALL_FORMATS = TABLES.keys() - {"xattrs", "sums"}


class Salvage:
    """A copy of an index, open."""

    def __init__(self, database: sqlite3.Connection | None, problems: list[str], *, lost_commits: bool) -> None:
        self._database = database
        self.problems = problems
        """What is wrong with the database's own structure."""
        self.lost_commits = lost_commits
        """The log is damaged in the middle: what was committed behind that is lost."""

    @property
    def is_there(self) -> bool:
        return self._database is not None

    def rows(self, name: str) -> Iterator[Row]:
        """Every row of a table that can be read, verified by nobody yet; behind damage one may come twice."""
        if self._database is None:
            return
        table = TABLES[name]
        waiting = deque([(table.low, table.high)])
        num_barren = 0
        while waiting and num_barren < _MAX_BARREN:
            low, high = waiting.popleft()
            last = yield from self._until_damage(table, low, high, "")
            if last is None:
                continue
            num_barren = 0 if last else num_barren + 1
            low = table.after(last[: table.num_key_columns]) if last else low
            last = yield from self._until_damage(table, low, high, " DESC")
            if last is None:
                continue
            num_barren = 0 if last else num_barren + 1
            high = last[: table.num_key_columns] if last else high
            middle = table.from_number((table.to_number(low) + table.to_number(high)) // 2)
            if table.to_number(low) < table.to_number(middle) < table.to_number(high):
                waiting += [(low, middle), (middle, high)]

    def _until_damage(self, table: _Table, low: Key, high: Key, order: str) -> Generator[Row, None, Row | None]:
        """Rows from one end on; the last one before the damage, or an empty one. None: there is no damage."""
        last: Row = ()
        try:
            for row in self._scan(table, low, high, order):
                last = row
                yield row
        except sqlite3.DatabaseError:
            pass
        else:
            return None
        if last and order:
            high = last[: table.num_key_columns]
        elif last:
            low = table.after(last[: table.num_key_columns])
        try:  # Python's cursor is one row ahead, and gives an error in place of the row before
            for row in self._scan(table, low, high, f"{order} LIMIT 1"):
                last = row
                yield row
        except sqlite3.DatabaseError:
            pass
        return last

    def _scan(self, table: _Table, low: Key, high: Key, order: str) -> Iterator[Row]:
        assert self._database is not None
        marks = ", ".join("?" * table.num_key_columns)
        order, limit, count = order.partition(" LIMIT")
        columns = ", ".join(f"{column}{order}" for column in table.key.split(", "))
        yield from self._database.execute(
            f"SELECT * FROM {table.name} WHERE ({table.key}) >= ({marks}) AND ({table.key}) < ({marks}) "  # noqa: S608
            f"ORDER BY {columns}{limit}{count}",  # names of ours
            (*low, *high),
        )


@contextmanager
def salvage(index: Path, *, quick: bool = False) -> Iterator[Salvage]:
    """Open an index that may be damaged, or not be there. Invalid: it is of a newer release, or of something else."""
    if not index.exists() or not index.stat().st_size:
        yield Salvage(None, ["it is empty" if index.exists() else "there is none"], lost_commits=False)
        return
    with tempfile.TemporaryDirectory(prefix="symphony-fsck-", dir=_place_for(index)) as directory:
        copy = Path(directory) / "index.db"
        try:
            _copy(index, copy)
        except OSError as error:
            raise SymError(f"can't read the index {index}: {error.strerror}", error.errno) from error
        opened, problems = _open(copy, index)
        try:
            problems += [] if opened is None else _problems(opened, quick=quick)
            yield Salvage(opened, problems, lost_commits=has_lost_commits(Path(f"{index}-wal")))
        finally:
            if opened is not None:
                opened.close()


def _place_for(index: Path) -> Path | None:
    """Memory, if the copy takes no more than half of what is free there; else where temporary files go."""
    log = Path(f"{index}-wal")
    needed = index.stat().st_size + (log.stat().st_size if log.exists() else 0)
    if os.access(_MEMORY, os.W_OK) and 2 * needed < shutil.disk_usage(_MEMORY).free:
        return _MEMORY
    return None


def _copy(index: Path, copy: Path) -> None:
    for suffix in ("", "-wal"):
        source = Path(f"{index}{suffix}")
        if source.exists():
            shutil.copyfile(source, f"{copy}{suffix}")


def _open(copy: Path, index: Path) -> tuple[sqlite3.Connection | None, list[str]]:
    """The copy, and what had to be done to it. Its first page is that of every index of this format: see `_mend`."""
    problem = ""
    for mend in (lambda _copy: None, _mend_first_page):
        mend(copy)
        database = sqlite3.connect(copy, isolation_level=None)
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
            version = database.execute("PRAGMA user_version").fetchone()[0]
            application = database.execute("PRAGMA application_id").fetchone()[0]
        except sqlite3.DatabaseError as error:
            problem = problem or f"its first page: {error}"
            database.close()
            continue
        if tables >= _OF_ALL_FORMATS:
            _require_readable(index, version, application)
            if application != APPLICATION_ID or not 1 <= version <= FORMAT_VERSION:
                problem = problem or f"its header: it is said to be of format {version} and kind {application:#x}"
            elif version < FORMAT_VERSION:
                _migrate(database, version)
            return database, [problem] if problem else []
        database.close()
        if tables:
            raise Invalid(f"{index} is a database of something else")
        problem = problem or "its first page: no table is in it"
    return None, [problem]


def _require_readable(index: Path, version: int, application: int) -> None:
    if application == APPLICATION_ID and version > FORMAT_VERSION:
        raise Invalid(
            f"{index} is of format {version}, and this release knows formats up to {FORMAT_VERSION}: use the release "
            "that wrote it"
        )


def _migrate(database: sqlite3.Connection, version: int) -> None:
    """As a daemon would; as far as that goes with damage: what is left of the old format is mended."""
    for old in range(version, FORMAT_VERSION):
        try:
            database.execute("BEGIN")
            MIGRATIONS[old](database)
            database.execute("COMMIT")
        except (Broken, sqlite3.DatabaseError):
            if database.in_transaction:
                database.execute("ROLLBACK")
            return


def _has_pointer_map(copy: Path) -> bool:
    """Whether it was made, or written anew, by a release whose indexes shrink: else page 2 is the root of a table."""
    with copy.open("rb") as file:
        file.seek(_PAGE_BYTES)
        return file.read(1) not in _WITHOUT_ROWID


def _is_root(copy: Path, page: int) -> bool:
    """Whether the pointer map says that a table begins at a page."""
    with copy.open("rb") as file:
        file.seek(_PAGE_BYTES + (page - 3) * _MAP_ENTRY_BYTES)
        return file.read(1) == bytes([_ROOT_PAGE])


def _mend_first_page(copy: Path) -> None:
    """Its header and the list of its tables, which begin in the same places in every index."""
    with tempfile.TemporaryDirectory(dir=copy.parent) as directory:
        path = Path(directory) / "index.db"
        Index(path).close()
        with closing(sqlite3.connect(path)) as database:
            (root_of_sums,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sums'").fetchone()
            if not _has_pointer_map(copy):
                database.executescript(_AS_FORMAT_3)
            elif not _is_root(copy, root_of_sums):
                database.executescript(_AS_FORMAT_4)
        page = bytearray(path.read_bytes()[:_PAGE_BYTES])
    num_pages = -(-copy.stat().st_size // _PAGE_BYTES)
    struct.pack_into(">III", page, 28, num_pages, 0, 0)  # its size, and no list of free pages
    with copy.open("r+b") as file:
        file.write(page)
        file.truncate(num_pages * _PAGE_BYTES)


def _problems(database: sqlite3.Connection, *, quick: bool) -> list[str]:
    check = "quick_check" if quick else "integrity_check"
    try:
        found = [str(row[0]) for row in database.execute(f"PRAGMA {check}({_SHOWN_PROBLEMS})")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found
