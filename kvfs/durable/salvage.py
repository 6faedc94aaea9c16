"""Reads every row of a damaged index that can still be read. The rows are read one by one, from a copy of the index.

The state is not changed. SQLite writes even for a reader: it builds an index of the log in shared memory, and
checkpoints the log when it closes the database. So SQLite gets a copy of the index and its log. The copy is in memory
if memory has room, because it has the token ids of prompts.
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

_MEMORY = Path("/dev/shm")  # noqa: S108 - a new directory is made in it
_MAX_BARREN = 400
"""The search of a table ends after this many consecutive scans without a row. These scans take a tenth of a second."""
_PAGE_BYTES = 4096
_NAME_BITS = 64
_WITHOUT_ROWID = {b"\2", b"\x0a"}
"""Possible first bytes of a page of a table WITHOUT ROWID."""
_AS_FORMAT_4 = "DROP TABLE sums; PRAGMA user_version=4;"
_AS_FORMAT_3 = "DROP TABLE sums; DROP TABLE xattrs; PRAGMA user_version=3; PRAGMA auto_vacuum=0; VACUUM;"
_ROOT_PAGE, _MAP_ENTRY_BYTES = 1, 5
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, with a mapping of its keys to numbers. The search for sound rows after damage bisects these numbers."""

    name: str
    key: str
    low: Key
    high: Key
    """A key greater than all others."""
    num_key_columns: int
    to_number: Callable[[Key], int]
    from_number: Callable[[int], Key]
    after: Callable[[Key], Key]
    """Function that returns the least key greater than a given key."""


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
    """An open copy of an index."""

    def __init__(self, database: sqlite3.Connection | None, problems: list[str], *, lost_commits: bool) -> None:
        self._database = database
        self.problems = problems
        """Faults of the database's own structure."""
        self.lost_commits = lost_commits
        """Whether the log is damaged in the middle, so that later commits are lost."""

    def rows(self, name: str) -> Iterator[Row]:
        """Yield every row of a table that can be read, without verifying it. If the table is damaged, a row may be
        yielded twice.
        """
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
        """Yield rows from one end of a range up to damage. Return the last row before the damage, () if no row was
        read, or None without damage.
        """
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
        try:  # Python's cursor reads one row ahead, so the row before the error was lost
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
            f"ORDER BY {columns}{limit}{count}",  # all names are constants
            (*low, *high),
        )


@contextmanager
def salvage(index: Path, *, quick: bool = False) -> Iterator[Salvage]:
    """Open an index that may be damaged or missing. Raise Invalid if a newer release or another program wrote the
    index.
    """
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
    """Return a directory in memory if the copy takes less than half of the free bytes there, or None for the default
    directory.
    """
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
    """Open the copy, with a new first page if necessary (see `_mend_first_page`). Return the database and the problems
    found.
    """
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
    """Migrate the copy as a daemon would, as far as damage allows. fsck mends rows that stay in an old format."""
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
    """Whether page 2 is a pointer map, which SQLite needs to shrink a database. In an index of an older release, page 2
    is the root of a table.
    """
    with copy.open("rb") as file:
        file.seek(_PAGE_BYTES)
        return file.read(1) not in _WITHOUT_ROWID


def _is_root(copy: Path, page: int) -> bool:
    """Whether the pointer map says that a table begins at this page."""
    with copy.open("rb") as file:
        file.seek(_PAGE_BYTES + (page - 3) * _MAP_ENTRY_BYTES)
        return file.read(1) == bytes([_ROOT_PAGE])


def _mend_first_page(copy: Path) -> None:
    """Replace the first page of a copy. The first page has the header and the list of tables. Tables begin at fixed
    pages, so the first page of a new index fits.
    """
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
    struct.pack_into(">III", page, 28, num_pages, 0, 0)  # the size of the database, and no list of free pages
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
