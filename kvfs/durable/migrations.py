"""Migrations of the index, each from one format to the next in one transaction. The migrations run when a newer release
opens the index.

A migration reads rows in its old format. It may use functions of `kvfs.durable.records` only as long as these keep
reading that format. When such a function changes, its old code has to be copied here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from kvfs.durable.records import decode_inode, encode_inode, encode_xattrs
from kvfs.names.inode import MOST_IN_MEMORY, XattrSums

_LARGE_ROW_BYTES = 256
"""Size in bytes of a row with a few attributes. Only larger rows are decoded, because only they may have large
attributes.
"""


def mark_files_with_entries(database: sqlite3.Connection) -> None:
    """1 to 2: the row of a KV file says that the file has a version. So if the version is lost, the file does not seem
    empty.
    """
    rows = database.execute(
        "SELECT number, record FROM inodes WHERE number IN (SELECT number FROM versions)"
    ).fetchall()
    marked = [
        (encode_inode(number, decode_inode(number, record)._replace(has_entries=True)), number)
        for number, record in rows
    ]
    database.executemany("UPDATE inodes SET record = ? WHERE number = ?", marked)


def let_versions_have_turns(_database: sqlite3.Connection) -> None:
    """2 to 3: a version's row may have turns after its marks. Older rows need no change, because their count of turns
    is 0.
    """


def put_large_attributes_apart(database: sqlite3.Connection) -> None:
    """3 to 4: large attributes move to a row of their own, and are read on demand."""
    database.execute("CREATE TABLE xattrs (number INTEGER PRIMARY KEY, record BLOB NOT NULL)")
    large = database.execute("SELECT number FROM inodes WHERE length(record) > ?", (_LARGE_ROW_BYTES,)).fetchall()
    for (number,) in large:  # one at a time, because together the rows may exceed the memory
        (row,) = database.execute("SELECT record FROM inodes WHERE number = ?", (number,)).fetchone()
        record = decode_inode(number, row)
        sums = XattrSums.of(record.xattrs)
        if sums.num_bytes > MOST_IN_MEMORY:
            database.execute("INSERT INTO xattrs VALUES (?, ?)", (number, encode_xattrs(number, record.xattrs)))
            inode = encode_inode(number, record._replace(xattrs={}, apart=sums))
            database.execute("UPDATE inodes SET record = ? WHERE number = ?", (inode, number))


def make_sums(database: sqlite3.Connection) -> None:
    """4 to 5: plain files have checksums. Existing files get checksums when the daemon has synced and read them."""
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
"""Migrations, by the format that they start from."""
