"""Handles of control files. Documents are made when they are read. Texts may grow while they are open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvfs.control.text_view import TextView
from kvfs.control.text_writer import TextWriter
from kvfs.fs import FileSystem
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from libsym.errors import NotPermitted, NotSupported


class ControlHandle(Protocol):
    """An open control file."""

    async def read(self, offset: int, size: int) -> bytes:
        """Read as `pread(2)` does."""
        ...

    async def write(self, offset: int, data: bytes) -> int:
        """Write as `pwrite(2)` does. Return the number of bytes written."""
        ...

    async def flush(self, pid: int) -> None:
        """Finish all writes, because process `pid` has closed a descriptor."""
        ...

    async def sync(self) -> None:
        """Make the file behind the handle durable, as `fsync(2)` does."""
        ...

    async def release(self) -> None:
        """Free the handle's resources after its last descriptor was closed."""
        ...

    def close(self) -> None:
        """Free the handle's resources at once, because the mount is gone."""
        ...


class Document:
    """A file whose bytes are made at the first read. A reader that has reached the end and reads again from the start
    gets new bytes.
    """

    def __init__(
        self, make: Callable[[], bytes], hold: Callable[[], Callable[[], None]], closed: Callable[[ControlHandle], None]
    ) -> None:
        """`hold` counts one more kept document, and returns a function that undoes the count."""
        self._make = make
        self._hold = hold
        self._closed = closed
        self._data: bytes | None = None
        """The document, if the reader has read only a part of it; else None."""
        self._let_go: Callable[[], None] | None = None
        self._end = 0
        """Length of the document that was last read to its end; 0: no document was read to its end."""

    async def read(self, offset: int, size: int) -> bytes:
        if self._data is None and offset >= self._end > 0:
            return b""
        data = self._make() if self._data is None else self._data
        if offset + size >= len(data):
            self._drop()
            self._end = len(data)
        elif self._data is None:
            self._let_go = self._hold()
            self._data = data
        return data[offset : offset + size]

    def _drop(self) -> None:
        if self._let_go is not None:
            self._let_go()
        self._data = self._let_go = None

    async def write(self, offset: int, data: bytes) -> int:  # noqa: ARG002 - as the protocol has it
        raise NotPermitted("control files can't be changed")

    async def flush(self, pid: int) -> None:
        """Do nothing, because no program can write to a document."""

    async def sync(self) -> None:
        """Do nothing, because a document is never stored."""

    async def release(self) -> None:
        self.close()

    def close(self) -> None:
        self._drop()
        self._closed(self)


class TextHandle:
    """An open file of the text view. A read returns text that the context has now. A write appends to the context."""

    def __init__(
        self,
        fs: FileSystem,
        view: TextView,
        inode: Inode,
        writer: TextWriter | None,
        closed: Callable[[ControlHandle], None],
        *,
        appends: bool,
    ) -> None:
        self._tree = fs.volume.tree
        self._storage = fs.volume.storage
        self._view = view
        self._inode = inode
        self._writer = writer
        self._closed = closed
        self._appends = appends
        self._start = 0
        """Number of bytes of text that the file had before the first write."""
        self._tree.opened(inode)

    def is_writing(self, inode: Inode) -> bool:
        """Whether this handle has written text to that inode."""
        return self._writer is not None and self._inode is inode and self._writer.has_begun

    async def read(self, offset: int, size: int) -> bytes:
        content = self._inode.content
        return await self._view.read(content, offset, size) if isinstance(content, KvFile) else b""

    async def write(self, offset: int, data: bytes) -> int:
        if self._writer is None:
            raise NotSupported("the file is open for reading only")
        if not self._writer.has_begun:
            content = self._inode.content
            self._start = self._view.size(content) if isinstance(content, KvFile) else 0
        # With O_APPEND the kernel sets the offset to the end of the file as the kernel knows it. But programs also
        # append by calls, which the kernel does not see.
        if not self._appends and offset != self._start + self._writer.num_bytes:
            raise not_at_end(self._tree.path_of(self._inode))
        return await self._writer.write(data)

    async def flush(self, pid: int) -> None:
        if self._writer is not None:
            await self._writer.flush(pid)

    async def sync(self) -> None:
        if self._writer is not None:
            await self._writer.settle()
        await self._storage.sync(self._inode)

    async def release(self) -> None:
        try:
            if self._writer is not None:
                await self._writer.release()
        finally:
            self._drop()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._drop()

    def _drop(self) -> None:
        self._closed(self)
        self._tree.closed(self._inode)


def not_at_end(name: object) -> NotSupported:
    """Return the error for a write that does not append."""
    return NotSupported(f"{name}: text can only be appended to a context, or replace all of it")
