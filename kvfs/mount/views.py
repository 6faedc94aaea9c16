"""Views: the snapshots that readers of KV files on the mount see.

The kernel's page cache belongs to a node (see `kvfs.mount.nodes`), not to an open. So all handles of one node that use
the page cache share one view, which is a snapshot. The view's size and mtime stay the same until the last of these
handles is closed, even if programs append meanwhile. A handle that may write gets a snapshot of its own, and bypasses
the page cache (direct I/O, for which MAP_SHARED is refused).

A read of pages in memory is answered directly from the arena. The answer is sent before another task runs, so the pages
can't be evicted before that. Pages that are only on disk are read into memory outside of the arena
(`kvfs.mount.spans`).
"""

from __future__ import annotations

from typing import TypeAlias

from kvfs.mount.eager import Eager, Mutex
from kvfs.mount.spans import Rooms, Spans
from kvfs.names.content import Content, KvFile
from kvfs.names.inode import Inode
from kvfs.pages.looking import Bytes
from kvfs.volume.volume import Volume

Version: TypeAlias = tuple[Content, int]
"""A content, with its count of changes. Equal versions have equal bytes. The version of a plain file never changes,
because the kernel itself updates its page cache.
"""


def version_of(inode: Inode) -> Version | None:
    """Return the version that a regular file has now."""
    content = inode.content
    if content is None:
        return None
    return content, content.changes if isinstance(content, KvFile) else 0


class Reader:
    """A snapshot for asynchronous reads. A worker computes missing hashes before the first byte is read."""

    __slots__ = (
        "_closing",
        "_eager",
        "_num_reading",
        "_prepared",
        "_preparing",
        "_snapshot",
        "_spans",
        "_volume",
        "version",
    )

    def __init__(self, volume: Volume, kv: KvFile, eager: Eager, rooms: Rooms) -> None:
        """`rooms`: memory for pages that are only on disk."""
        self._eager = eager
        self.version: Version = (kv, kv.changes)
        self._volume = volume
        self._snapshot = volume.open_snapshot(kv)
        self._spans = Spans(self._snapshot, volume.storage, rooms, eager)
        self._prepared = False
        self._preparing = Mutex(eager)
        self._num_reading = 0
        self._closing = False

    @property
    def size(self) -> int:
        return self._snapshot.size

    async def read(self, offset: int, size: int) -> bytes | memoryview:
        """Read as `pread(2)` does. Use the result before the next await, because it may be a view of a page's memory.

        That memory is in the arena, or in a span (`kvfs.mount.spans`).
        """
        self._num_reading += 1
        try:
            if not self._prepared:
                await self._prepare()
            lent: dict[int, Bytes] = {}
            while missing := self._snapshot.missing(offset, size, lent):
                lent = {number: bytes(data) for number, data in lent.items()}  # views are invalid after the next await
                lent |= await self._spans.read(missing)
            return self._snapshot.read(offset, size, lent)
        finally:
            self._num_reading -= 1
            if self._closing and not self._num_reading:
                self._end()

    async def _prepare(self) -> None:
        """Hash pages that were never hashed, at about 1 GB/s. After an interruption, the next reader hashes only the
        pages that are left.

        Pages that are only on disk are read in spans, as `read` does. One span is hashed while the next span is read.
        """
        async with self._preparing:
            if not self._prepared:
                while missing := self._snapshot.unhashed():
                    async with self._spans.lent(missing) as pages:
                        await self._eager.long_job(self._snapshot.owner, self._snapshot.hash, pages)
                await self._eager.long_job(self._snapshot.owner, self._snapshot.prepare)
                self._prepared = True

    def fork_into(self, origin: Inode, inode: Inode) -> None:
        """Make an empty plain file a fork of the version that this reader of `origin` sees."""
        assert not self._closing
        kv, _changes = self.version
        assert isinstance(kv, KvFile)
        self._volume.fork_into(self._snapshot, origin, kv, inode)

    def close(self) -> None:
        """Release the snapshot's pages as soon as no read is under way."""
        assert not self._closing
        self._closing = True
        if not self._num_reading:
            self._end()

    def _end(self) -> None:
        self._spans.close()
        self._volume.close_snapshot(self._snapshot)


class View:
    """The reader that is shared by all handles of one node that use the page cache. While the view is open, `stat`
    shows the view's times.
    """

    __slots__ = ("ctime_ns", "mtime_ns", "reader", "users")

    def __init__(self, reader: Reader, mtime_ns: int, ctime_ns: int) -> None:
        self.reader = reader
        self.mtime_ns = mtime_ns
        self.ctime_ns = ctime_ns
        self.users: set[object] = set()
