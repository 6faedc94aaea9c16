"""What is behind a file's name: the bytes of a plain file, or one version of a KV file."""

from __future__ import annotations

from typing import TypeAlias

from kvfs.names.plain import PlainFile
from kvfs.pages.table import PageTable


class KvFile:
    """One version of a KV file, shared by the inode that shows it and by every handle of a LIP that opened it.

    Truncating the name to nothing replaces the inode's content; handles keep this one, and the last of all users
    gives its pages back.
    """

    __slots__ = ("__weakref__", "changes", "cuts", "fewest", "hits", "table", "users")

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.users = 1
        self.changes = 0
        """Counts changes of the entries: equal counts mean an equal image."""
        self.fewest = table.length
        """The fewest entries it has had since the text view looked: those are as they were then."""
        self.hits = 0
        """How often it was opened, forked or read."""
        self.cuts = 0
        """Counts truncations: with equal counts, entries that were there are there unchanged."""

    def retain(self) -> None:
        assert self.users > 0
        self.users += 1

    def release(self) -> bool:
        """One user less; true when that was the last one and the pages were given back."""
        assert self.users > 0
        self.users -= 1
        if self.users == 0:
            self.table.close()
        return self.users == 0


Content: TypeAlias = PlainFile | KvFile
