"""From one format of the index to the next: a step for each, in one transaction, when a newer release opens it.

A step reads rows as that format wrote them. It may use what `kvfs.durable.records` has as long as that does not change;
whoever changes it copies the old reading here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from kvfs.durable.records import decode_inode, encode_inode, encode_xattrs
from kvfs.names.inode import MOST_IN_MEMORY, XattrSums

_LARGE_ROW_BYTES = 256
"""A row of a few attributes has as much: more are looked at."""


def mark_files_with_entries(database: sqlite3.Connection) -> None:
    """1 to 2: the row of a KV file that has a version says so, lest it is taken for an empty one without it."""
    rows = database.execute(
        "SELECT number, record FROM inodes WHERE number IN (SELECT number FROM versions)"
    ).fetchall()
    marked = [
        (encode_inode(number, decode_inode(number, record)._replace(has_entries=True)), number)
        for number, record in rows
    ]
    database.executemany("UPDATE inodes SET record = ? WHERE number = ?", marked)


def let_versions_have_turns(_database: sqlite3.Connection) -> None:
    """2 to 3: a row of entries may have turns behind its marks, whose number was 0 in all rows before."""


def put_large_attributes_apart(database: sqlite3.Connection) -> None:
    """3 to 4: attributes that are large together have a row of their own, and are read when they are wanted."""
    database.execute("CREATE TABLE xattrs (number INTEGER PRIMARY KEY, record BLOB NOT NULL)")
    large = database.execute("SELECT number FROM inodes WHERE length(record) > ?", (_LARGE_ROW_BYTES,)).fetchall()
    for (number,) in large:  # one by one: together they may be larger than memory
        (row,) = database.execute("SELECT record FROM inodes WHERE number = ?", (number,)).fetchone()
        record = decode_inode(number, row)
        sums = XattrSums.of(record.xattrs)
        if sums.num_bytes > MOST_IN_MEMORY:
            database.execute("INSERT INTO xattrs VALUES (?, ?)", (number, encode_xattrs(number, record.xattrs)))
            inode = encode_inode(number, record._replace(xattrs={}, apart=sums))
            database.execute("UPDATE inodes SET record = ? WHERE number = ?", (inode, number))


def make_sums(database: sqlite3.Connection) -> None:
    """4 to 5: plain files have checksums. Those that there are get theirs when the daemon has synced and read them."""
    database.execute(
        """CREATE TABLE sums (number INTEGER NOT NULL, part INTEGER NOT NULL, record BLOB NOT NULL,
                   PRIMARY KEY (number, part)) WITHOUT ROWID"""
    )


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: mark_files_with_entries,
    2: let_versions_have_turns,
    3: put_large_attributes_apart,
    4: make_sums,
}
"""By the format that they begin with."""
