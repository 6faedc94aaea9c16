"""The index: an SQLite database with the names and inodes of the state. Without the index, slots and backing files are
useless.

One connection reads, writes and checkpoints. A commit returns when it is on disk (`synchronous=FULL`). The number of
the format is the database's `user_version`. An older format is migrated, and a newer format is refused.

    about(key, value, row_check)                       next_inode; uuid
    identities(id, facts, row_check)                   facts of the model that computed the pages: JSON
    inodes(number, record)                             `kvfs.durable.records`
    names(directory, name, number, row_check)
    versions(number, record)                           of KV files: entries, and where turns begin
    slots(identity, slot, page_check, kept, entries, row_check)
    xattrs(number, record)                             of inodes whose attributes are too many for their records
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
"""Size of the log: 4 MiB for the 1,000 pages after which SQLite checkpoints it, and 2 MiB in case a checkpoint lacks
room.
"""

SPARE_PAGES = 1024
"""Free pages of SQLite that an index keeps for later rows: 4 MiB."""
PAGES_A_SLICE = 1024
"""The most pages of SQLite that one call of `shrink` frees. A commit waits about 20 ms for such a call."""
MOST_REWRITTEN_BYTES = 256 << 20
"""The size up to which an index of an older release is rewritten. The rewriting is done in memory, and adds some
seconds to the start.
"""
_INCREMENTAL = 2
_SETTINGS = ("synchronous=FULL", "cache_size=-16384", f"journal_size_limit={LOG_BYTES}")

APPLICATION_ID = 0x53594D4B
"""`SYMK`: file(1) may recognise an index by it."""

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
    """Rows that one commit writes and removes. The commit succeeds or fails as a whole."""

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
    """Pairs of inode and part: the sums of that part and of all later parts are removed."""
    next_inode: int = 0

    @property
    def count(self) -> int:
        return sum(len(getattr(self, name)) for name in self.__slots__ if name != "next_inode")


class Index:
    """An open index. Only one thread at a time uses the index."""

    def __init__(self, path: Path, new_uuid: str | None = None) -> None:
        """Open the index, or make a new index. Raise Invalid if a newer release or another program wrote the file.

        `new_uuid`: the uuid of a new index; by default a random one.
        """
        self.path = path
        self._new_uuid = new_uuid or str(uuid.uuid4())
        self._lock = threading.Lock()
        self._refusal = ""
        self.has_spare = False
        """Whether the index had more than SPARE_PAGES free pages after the last commit. If so, `shrink` can return some
        pages to the file system.
        """
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
        """Copy the log into the database and sync it, before new writes. A killed daemon may not have synced its last
        writes.
        """
        try:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:  # the log is synced, and a later checkpoint copies it
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
        """Write all rows to disk, or raise an error and write none."""
        database = self._database
        self.require_commits()
        try:
            with self._lock:
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
        """Return the attributes in an inode's row of attributes, or None if the inode has no such row. Raise EIO if the
        attributes are damaged.
        """
        try:
            return self.read_xattrs(number)
        except Broken as error:
            raise SymError(f"{error}: {SEE_FSCK}", errno.EIO) from error

    def read_xattrs(self, number: int) -> dict[bytes, bytes] | None:
        """Return the same attributes as `xattrs`. Raise Broken if they are damaged."""
        try:
            with self._lock:
                row = self._database.execute("SELECT record FROM xattrs WHERE number = ?", (number,)).fetchone()
            return None if row is None else decode_xattrs(number, row[0])
        except sqlite3.Error as error:
            raise _failed("read", self.path, error) from error
        except Broken as error:
            raise Broken(f"attributes of inode {number} are damaged ({error})") from error

    def shrink(self) -> bool:
        """Give some free pages of SQLite back to the file system. Return whether another call can give back more. Raise
        SymError on failure.
        """
        try:
            with self._lock:
                spare = _pragma(self._database, "freelist_count") - SPARE_PAGES
                if spare <= 0 or _pragma(self._database, "auto_vacuum") != _INCREMENTAL:
                    return False
                # The statement runs as a script. Otherwise Python would step it only once, because it has no columns,
                # and would free only one page.
                self._database.executescript(f"PRAGMA incremental_vacuum({min(spare, PAGES_A_SLICE)})")
                if spare > PAGES_A_SLICE:
                    return True
                self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            raise _failed("shrink", self.path, error) from error
        return False

    def _let_shrink(self) -> None:
        """Rewrite an index of an older release once, so that it can shrink. A large index stays as it is."""
        database = self._database
        if _pragma(database, "auto_vacuum") == _INCREMENTAL:
            return
        num_pages = _pragma(database, "page_count") - _pragma(database, "freelist_count")
        num_bytes = num_pages * _pragma(database, "page_size")
        if num_bytes > MOST_REWRITTEN_BYTES:
            log.info("%s has %d bytes, too many to rewrite: freed space stays in it for reuse", self.path, num_bytes)
            return
        database.execute("PRAGMA temp_store=MEMORY")  # token ids of prompts must not get into temporary files
        try:
            database.execute("VACUUM")
        except sqlite3.Error as error:  # if the index is damaged, later reads report it
            log.info("freed space stays in %s for reuse: %s", self.path, error)
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
        """Return every row of a table. Raise Broken if some rows can't be read."""
        try:
            return self._database.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - a constant name
        except sqlite3.Error as error:
            if _is_damage(error):
                raise Broken(str(error)) from error
            raise _failed("read", self.path, error) from error

    def for_salvage(self) -> sqlite3.Connection:
        """Return the database for a caller that reads as many rows as possible. In texts, bytes that are not UTF-8 are
        replaced.
        """
        self._database.text_factory = lambda text: text.decode("utf-8", "replace")
        return self._database

    def refuse_commits(self, why: str) -> None:
        """Make every commit fail from now on, because SQLite could destroy further rows by writing."""
        self._refusal = why

    def require_commits(self) -> None:
        """Raise EIO if commits are refused."""
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
        """Remove attributes of inodes that no longer exist. Return the inodes that still have rows of attributes."""
        try:
            self._database.execute("DELETE FROM xattrs WHERE number NOT IN (SELECT number FROM inodes)")
            return {number for (number,) in self._database.execute("SELECT number FROM xattrs")}
        except sqlite3.Error as error:
            raise _failed("read", self.path, error) from error

    def close(self) -> None:
        """Close the database, which checkpoints the rest of the log. All commits are on disk already."""
        self._database.close()


def _sync_log(path: Path) -> None:
    """Sync the log, so that all commits in it are on disk. A killed daemon may not have synced its last commit."""
    log = Path(f"{path}-wal")
    try:
        with log.open("rb") as file:
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise SymError(f"can't sync {log}: {error.strerror}", error.errno) from error


def _hold_room(path: Path) -> None:
    """Reserve room for the log, so that removals can be recorded even on a full disk. Otherwise no bytes could be
    freed, because bytes are freed only when the index no longer names them.
    """
    log_path = Path(f"{path}-wal")
    try:
        with log_path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, LOG_BYTES)
    except FileNotFoundError:  # the first commit makes the log
        return
    except OSError as error:
        log.info("no room is held for %s: %s", log_path, error.strerror)


def _connect(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    # In exclusive mode no other process reads or checkpoints, and SQLite needs no shared memory.
    for setting in ("locking_mode=EXCLUSIVE", f"auto_vacuum={_INCREMENTAL}", "journal_mode=WAL", *_SETTINGS):
        database.execute(f"PRAGMA {setting}")
    return database


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


_ERRNOS = {sqlite3.SQLITE_FULL: 28, sqlite3.SQLITE_IOERR: 5, sqlite3.SQLITE_READONLY: 30, sqlite3.SQLITE_CORRUPT: 5}


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or not code  # 0: a text is not UTF-8


def _failed(verb: str, path: Path, error: sqlite3.Error) -> SymError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    advice = f": {SEE_FSCK}" if _is_damage(error) else ""
    return SymError(f"can't {verb} the index {path}: {error}{advice}", _ERRNOS.get(code, 5))
