"""Import of files that are copied in: a plain file becomes a KV file once its bytes are a whole, valid image.

The kernel sends a FLUSH at each close of a descriptor, duplicated ones included, and each FLUSH tests the bytes. After
a failed test, later FLUSHes test again: `cat a > b` closes a descriptor before the first byte is written. If bytes
claim to be an image but are not valid, the closing program, such as `cp`, gets an error. The file stays a plain file
that may be written further. Bytes without that claim are simply a plain file.

A close gives no error while the file has gaps that no write has filled, or while another writer has the file open. For
example, `restic` closes a file after writing only some of its parts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Self

from kvfs.images.format import CLAIM_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, claims_to_be_image
from kvfs.images.header import ImagePlan, parse_header
from kvfs.images.importer import ImageImport, Survey
from kvfs.mount.disk_work import DiskWork
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.volume.volume import Volume
from libsym.errors import Invalid, NoSpace, OverQuota, SymError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a file's bytes are not an image. The same bytes are not tested again."""

    content: PlainFile
    changes: int
    error: SymError

    @classmethod
    def of(cls, inode: Inode, error: SymError) -> Self | None:
        """Return the refusal that should be remembered, or None. An error of a full pool is not remembered, because the
        pool may have room at the next test.
        """
        if isinstance(error, Invalid) and isinstance(inode.content, PlainFile):
            return cls(inode.content, inode.content.changes, error)
        return None

    def still_holds(self, inode: Inode) -> bool:
        return inode.content is self.content and self.content.changes == self.changes

    def again(self) -> SymError:
        return Invalid(str(self.error))


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first bytes of a file, in memory. Satisfies `ByteSource` as far as a header needs it."""

    data: bytes | memoryview
    size: int
    """Size of the whole file."""

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def read_into(self, offset: int, room: memoryview) -> int:
        found = self.read_at(offset, len(room))
        room[: len(found)] = found
        return len(found)


async def take_in(volume: Volume, inode: Inode, disk: DiskWork, until_s: float) -> bool:
    """Turn the file into a KV file if its bytes are an image. Return whether they are an image. Raise if the bytes only
    claim to be an image.

    The caller ensures that nothing writes to the file meanwhile. `until_s`: deadline for reading the beginning of the
    file. Each further read has a deadline of its own.
    """
    content = inode.content
    if not isinstance(content, PlainFile):
        return False
    await disk.at_rest(content, until_s)
    beginning = bytes(await disk.read(content, 0, CLAIM_BYTES, until_s))
    if not claims_to_be_image(beginning, content.size):
        return False
    try:
        await _import(volume, inode, content, disk, until_s)
    except SymError as error:
        path = str(volume.tree.path_of(inode))
        log.info("%s stays a plain file: %s", path, error, extra={"file": path})
        raise
    return True


async def _import(volume: Volume, inode: Inode, content: PlainFile, disk: DiskWork, until_s: float) -> None:
    size = content.size
    beginning = _Beginning(await disk.read(content, 0, LENGTH_BYTES + MAX_HEADER_BYTES, until_s), size)
    plan = volume.parse_image(beginning)
    try:
        incoming = await _begin(volume, plan, inode, disk)
    except (NoSpace, OverQuota):
        surveyed = await disk.long_job(inode, content, volume.survey_import(plan, inode))
        incoming = await _begin(volume, plan, inode, disk, surveyed)
    await disk.long_job(inode, content, incoming.load, undo=partial(volume.abandon_import, incoming, inode))
    volume.finish_import(incoming, inode)


async def _begin(
    volume: Volume, plan: ImagePlan, inode: Inode, disk: DiskWork, surveyed: Survey | None = None
) -> ImageImport:
    """Wait until memory has room for the pages, and begin the import."""
    await disk.leave()
    frames = await volume.room_for_import(plan, inode, surveyed)
    return volume.begin_import(plan, inode, surveyed, frames)
