"""The index: an SQLite database that says what the state is. Slots and backing files mean nothing without it.

One connection reads, writes and checkpoints. A commit returns when it is on disk (`synchronous=FULL`). The format is
the database's `user_version`: an older one is migrated, a newer one refused.

    about(key, value, row_check)                       next_inode; uuid
    identities(id, facts, row_check)                   what pages are of: JSON
    inodes(number, record)                             `kvfs.durable.records`
    names(directory, name, number, row_check)
    versions(number, record)                           of the inodes that are KV files: entries, and where turns begin
    slots(identity, slot, page_check, kept, entries, row_check)
    xattrs(number, record)                             of the inodes that have many, which are not in their records
    sums(number, part, record)                         of plain files: checksums of their bytes
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.durable.migrations import MIGRATIONS
from kvfs.durable.records import SEE_FSCK, Broken, decode_xattrs, text_check
from kvfs.durable.superblock import sync_directory
from libsym.errors import Invalid, SymError

FORMAT_VERSION = 5
log = logging.getLogger(__name__)

LOG_BYTES = 6 << 20
"""Of the log: what it grows to before SQLite takes it in (1,000 pages), and half as much for when that has no room."""

SPARE_PAGES = 1024
"""Free pages that an index keeps for what comes next: 4 MiB."""
PAGES_A_SLICE = 1024
"""So many it gives back at once; a commit waits for that, some 20 ms."""
MOST_REWRITTEN_BYTES = 256 << 20
"""Of an index of an older release: so much fits in memory, and a start takes some seconds longer."""
_INCREMENTAL = 2
_SETTINGS = ("synchronous=FULL", "cache_size=-16384", f"journal_size_limit={LOG_BYTES}")

APPLICATION_ID = 0x53594D4B
"""`SYMK`: what file(1) may say."""

_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL, row_check INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE identities (id INTEGER PRIMARY KEY, facts TEXT NOT NULL, row_check INTEGER NOT NULL);
CREATE TABLE inodes (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE names (directory INTEGER NOT NULL, name BLOB NOT NULL, number INTEGER NOT NULL,
                    row_check INTEGER NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
CREATE TABLE versions (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE slots (identity INTEGER NOT NULL, slot INTEGER NOT NULL, page_check INTEGER NOT NULL,
                    kept INTEGER NOT NULL, entries BLOB NOT NULL, row_check INTEGER NOT NULL,
                    PRIMARY KEY (identity, slot)) WITHOUT ROWID;
CREATE TABLE xattrs (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE sums (number INTEGER NOT NULL, part INTEGER NOT NULL, record BLOB NOT NULL,
                   PRIMARY KEY (number, part)) WITHOUT ROWID;
"""

Row = tuple[object, ...]


@dataclass(slots=True)
class Rows:
    """Rows that one commit writes and removes, all or nothing."""

    inodes: list[tuple[int, bytes]] = field(default_factory=list)
    gone_inodes: list[tuple[int]] = field(default_factory=list)
    names: list[tuple[int, bytes, int, int]] = field(default_factory=list)
    gone_names: list[tuple[int, bytes]] = field(default_factory=list)
    versions: list[tuple[int, bytes]] = field(default_factory=list)
    gone_versions: list[tuple[int]] = field(default_factory=list)
    slots: list[Row] = field(default_factory=list)
    gone_slots: list[tuple[int, int]] = field(default_factory=list)
    identities: list[tuple[int, str, int]] = field(default_factory=list)
    xattrs: list[tuple[int, bytes]] = field(default_factory=list)
    gone_xattrs: list[tuple[int]] = field(default_factory=list)
    sums: list[tuple[int, int, bytes]] = field(default_factory=list)
    gone_sums: list[tuple[int, int]] = field(default_factory=list)
    """From a part of a file's on."""
    next_inode: int = 0

    @property
    def count(self) -> int:
        return sum(len(getattr(self, name)) for name in self.__slots__ if name != "next_inode")


class Index:
    """An open index. Threads take turns."""

    def __init__(self, path: Path, new_uuid: str | None = None) -> None:
        """Opens it, or makes it where there is none. Invalid: it is of a newer release, or no index at all.

        `new_uuid`: what a new one says in place of a uuid of its own.
        """
        self.path = path
        self._new_uuid = new_uuid or str(uuid.uuid4())
        self._turn = threading.Lock()
        self._refusal = ""
        self.has_spare = False
        """Whether the last commit has left pages to `shrink` by."""
        try:
            _sync_log(path)
            self._database = _connect(path)
            self._prepare()
            self._let_shrink()
            self._settle()
            _hold_room(path)
        except sqlite3.Error as error:
            raise _failed("open", path, error) from error

    def _settle(self) -> None:
        """Put on disk what a killed daemon wrote, before anybody builds on it: perhaps nobody synced it."""
        try:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:  # the log was synced then; it is taken in later
                raise

    def _prepare(self) -> None:
        database = self._database
        version, application = _pragma(database, "user_version"), _pragma(database, "application_id")
        if not version and not application and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            database.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION};"
            )
            self._about("uuid", self._new_uuid)
            database.execute("COMMIT")
            sync_directory(self.path.parent)
            return
        if application != APPLICATION_ID:
            raise Invalid(f"{self.path} is a database of something else: choose another --state")
        if version > FORMAT_VERSION:
            raise Invalid(
                f"{self.path} is of format {version}, and this release knows formats up to {FORMAT_VERSION}: use the "
                "release that wrote it, or choose another --state"
            )
        for old in range(version, FORMAT_VERSION):
            database.execute("BEGIN IMMEDIATE")
            try:
                MIGRATIONS[old](database)
            except Broken as error:
                raise SymError(f"{self.path}, of format {old}, is damaged ({error}): {SEE_FSCK}") from error
            database.execute(f"PRAGMA user_version={old + 1}")
            database.execute("COMMIT")
            log.info("%s was of format %d, and is of format %d now", self.path, old, old + 1)

    def commit(self, rows: Rows) -> None:
        """All of it is on disk when this returns; or an error, and none of it is."""
        database = self._database
        self.require_commits()
        try:
            with self._turn:
                database.execute("BEGIN IMMEDIATE")
                try:
                    self._write(rows)
                    database.execute("COMMIT")
                except BaseException:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                    raise
                self.has_spare = _pragma(database, "freelist_count") > SPARE_PAGES
        except sqlite3.Error as error:
            raise _failed("write", self.path, error) from error

    def xattrs(self, number: int) -> dict[bytes, bytes] | None:
        """The attributes of an inode that are not in its record; None: it has no such row. EIO: they are damaged."""
        try:
            return self.read_xattrs(number)
        except Broken as error:
            raise SymError(f"{error}: {SEE_FSCK}", errno.EIO) from error

    def read_xattrs(self, number: int) -> dict[bytes, bytes] | None:
        """Return the same as `xattrs`. Broken: they are damaged."""
        try:
            with self._turn:
                row = self._database.execute("SELECT record FROM xattrs WHERE number = ?", (number,)).fetchone()
            return None if row is None else decode_xattrs(number, row[0])
        except sqlite3.Error as error:
            raise _failed("read", self.path, error) from error
        except Broken as error:
            raise Broken(f"attributes of inode {number} are damaged ({error})") from error

    def shrink(self) -> bool:
        """Give some free pages back to the file system; whether there are more to give. SymError: it can't be done."""
        try:
            with self._turn:
                spare = _pragma(self._database, "freelist_count") - SPARE_PAGES
                if spare <= 0 or _pragma(self._database, "auto_vacuum") != _INCREMENTAL:
                    return False
                # As a script: Python takes but the first step of a statement without columns, which is one page.
                self._database.executescript(f"PRAGMA incremental_vacuum({min(spare, PAGES_A_SLICE)})")
                if spare > PAGES_A_SLICE:
                    return True
                self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            raise _failed("shrink", self.path, error) from error
        return False

    def _let_shrink(self) -> None:
        """An index of an older release gets what lets it shrink: it is written anew, once, and while it is small."""
        database = self._database
        if _pragma(database, "auto_vacuum") == _INCREMENTAL:
            return
        num_pages = _pragma(database, "page_count") - _pragma(database, "freelist_count")
        num_bytes = num_pages * _pragma(database, "page_size")
        if num_bytes > MOST_REWRITTEN_BYTES:
            log.info("%s has %d bytes: it keeps the room of what is removed, for later use", self.path, num_bytes)
            return
        database.execute("PRAGMA temp_store=MEMORY")  # what it says of prompts stays where it is
        try:
            database.execute("VACUUM")
        except sqlite3.Error as error:  # damage is told of when it is read
            log.info("%s keeps the room of what is removed, for later use: %s", self.path, error)
        database.execute("PRAGMA temp_store=DEFAULT")

    def _write(self, rows: Rows) -> None:
        many = self._database.executemany
        many("INSERT OR REPLACE INTO identities VALUES (?, ?, ?)", rows.identities)
        many("DELETE FROM slots WHERE identity = ? AND slot = ?", rows.gone_slots)
        many("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?)", rows.slots)
        many("INSERT OR REPLACE INTO versions VALUES (?, ?)", rows.versions)
        many("DELETE FROM versions WHERE number = ?", rows.gone_versions)
        many("INSERT OR REPLACE INTO xattrs VALUES (?, ?)", rows.xattrs)
        many("DELETE FROM xattrs WHERE number = ?", rows.gone_xattrs)
        many("DELETE FROM sums WHERE number = ? AND part >= ?", rows.gone_sums)
        many("INSERT OR REPLACE INTO sums VALUES (?, ?, ?)", rows.sums)
        many("INSERT OR REPLACE INTO inodes VALUES (?, ?)", rows.inodes)
        many("DELETE FROM inodes WHERE number = ?", rows.gone_inodes)
        many("DELETE FROM names WHERE directory = ? AND name = ?", rows.gone_names)
        many("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", rows.names)
        if rows.next_inode:
            self._about("next_inode", str(rows.next_inode))

    def _about(self, key: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (key, value, text_check(key, value)))

    def rows(self, table: str) -> list[Row]:
        """Every row of a table. Broken: some can't be read."""
        try:
            return self._database.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - a name of ours
        except sqlite3.Error as error:
            if _is_damage(error):
                raise Broken(str(error)) from error
            raise _failed("read", self.path, error) from error

    def for_salvage(self) -> sqlite3.Connection:
        """The database, to be read as far as that goes: a text that is none comes with replacements."""
        self._database.text_factory = lambda text: text.decode("utf-8", "replace")
        return self._database

    def refuse_commits(self, why: str) -> None:
        """Every commit fails from now on: SQLite could lose more by writing."""
        self._refusal = why

    def require_commits(self) -> None:
        """EIO: commits are refused."""
        if self._refusal:
            raise SymError(f"nothing is kept: {self._refusal}: {SEE_FSCK}", errno.EIO)

    def problems(self) -> list[str]:
        """Return the faults that SQLite finds in the database's own structure."""
        try:
            found = [str(row[0]) for row in self._database.execute("PRAGMA integrity_check")]
        except sqlite3.Error as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def forget_lost_xattrs(self) -> set[int]:
        """Remove attributes of inodes that are gone; the inodes whose attributes are left."""
        try:
            self._database.execute("DELETE FROM xattrs WHERE number NOT IN (SELECT number FROM inodes)")
            return {number for (number,) in self._database.execute("SELECT number FROM xattrs")}
        except sqlite3.Error as error:
            raise _failed("read", self.path, error) from error

    def close(self) -> None:
        """Everything is on disk already; what is left of the log is taken in."""
        self._database.close()


def _sync_log(path: Path) -> None:
    """Commits that are read are on disk: a daemon that was killed may have written the last one, and not synced it."""
    log = Path(f"{path}-wal")
    try:
        with log.open("rb") as file:
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise SymError(f"can't sync {log}: {error.strerror}", error.errno) from error


def _hold_room(path: Path) -> None:
    """The log has its room before it needs any: on a full disk, too, it is written what was removed. Else nothing could
    be freed any more, for that waits until the index has forgotten it.
    """
    log_path = Path(f"{path}-wal")
    try:
        with log_path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, LOG_BYTES)
    except FileNotFoundError:  # it is made by the first commit
        return
    except OSError as error:
        log.info("no room is held for %s: %s", log_path, error.strerror)


def _connect(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    # Exclusive: nobody else reads or checkpoints, and no shared memory is needed.
    for setting in ("locking_mode=EXCLUSIVE", f"auto_vacuum={_INCREMENTAL}", "journal_mode=WAL", *_SETTINGS):
        database.execute(f"PRAGMA {setting}")
    return database


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


_ERRNOS = {sqlite3.SQLITE_FULL: 28, sqlite3.SQLITE_IOERR: 5, sqlite3.SQLITE_READONLY: 30, sqlite3.SQLITE_CORRUPT: 5}


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or not code  # 0: a text that is none


def _failed(verb: str, path: Path, error: sqlite3.Error) -> SymError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    advice = f": {SEE_FSCK}" if _is_damage(error) else ""
    return SymError(f"can't {verb} the index {path}: {error}{advice}", _ERRNOS.get(code, 5))
