"""What a reader of a KV file on the mount sees.

The kernel's page cache belongs to a node (see `kvfs.mount.nodes`), not to an open. So all cached opens of one node
share one view, a snapshot; its size and times stay put until the last of them is closed, whatever LIPs append
meanwhile. An open that may write gets a snapshot of its own, read past the cache (direct I/O, where MAP_SHARED is
refused).

What is in memory is answered as it lies in the arena; the reply is written before anybody else has the thread, so no
frame can be taken away under it. What is on disk alone is read to rooms outside of the arena (`kvfs.mount.spans`).
"""

from __future__ import annotations

from typing import TypeAlias

from kvfs.mount.eager import Eager, Mutex
from kvfs.mount.spans import Rooms, Spans
from kvfs.names.content import Content, KvFile
from kvfs.names.inode import Inode
from kvfs.pages.looking import Bytes
from kvfs.volume import Volume

Version: TypeAlias = tuple[Content, int]
"""Equal versions have equal bytes. A plain file has one version: the kernel itself writes its page cache."""


def version_of(inode: Inode) -> Version | None:
    """The version that a regular file has now."""
    content = inode.content
    if content is None:
        return None
    return content, content.changes if isinstance(content, KvFile) else 0


class Reader:
    """A snapshot for asynchronous reading: a worker makes it ready before its first byte is given out."""

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
        """`rooms`: for what is on disk alone."""
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
        """As `pread(2)`. The result may be a view of pages, or of a room: use it before the next await."""
        self._num_reading += 1
        try:
            if not self._prepared:
                await self._prepare()
            lent: dict[int, Bytes] = {}
            while missing := self._snapshot.missing(offset, size, lent):
                lent = {number: bytes(data) for number, data in lent.items()}  # a view is good until the next await
                lent |= await self._spans.read(missing)
            return self._snapshot.read(offset, size, lent)
        finally:
            self._num_reading -= 1
            if self._closing and not self._num_reading:
                self._end()

    async def _prepare(self) -> None:
        """Hash what was never hashed, at about 1 GB/s. Interrupted, it leaves what is done to the next reader.

        What is on disk alone comes in spans, as for a reader: one is hashed while the next is read.
        """
        async with self._preparing:
            if not self._prepared:
                while missing := self._snapshot.unhashed():
                    async with self._spans.lent(missing) as pages:
                        await self._eager.long_job(self._snapshot.owner, self._snapshot.hash, pages)
                await self._eager.long_job(self._snapshot.owner, self._snapshot.prepare)
                self._prepared = True

    def fork_into(self, origin: Inode, inode: Inode) -> None:
        """Make an empty plain file a fork of what this reader of `origin` sees."""
        assert not self._closing
        kv, _changes = self.version
        assert isinstance(kv, KvFile)
        self._volume.fork_into(self._snapshot, origin, kv, inode)

    def close(self) -> None:
        """Give the pages back, as soon as nobody is reading."""
        assert not self._closing
        self._closing = True
        if not self._num_reading:
            self._end()

    def _end(self) -> None:
        self._spans.close()
        self._volume.close_snapshot(self._snapshot)


class View:
    """The reader that all cached opens of one node share, and the attributes that must not move meanwhile."""

    __slots__ = ("ctime_ns", "mtime_ns", "reader", "users")

    def __init__(self, reader: Reader, mtime_ns: int, ctime_ns: int) -> None:
        self.reader = reader
        self.mtime_ns = mtime_ns
        self.ctime_ns = ctime_ns
        self.users: set[object] = set()
