"""When a plain file becomes a KV file: as soon as its bytes are a whole, valid image.

The kernel sends a FLUSH at every close of a duplicated descriptor (`cat a > b` closes one before its first byte is
written), so a test that fails is not the end: bytes that claim to be an image and are none give an error to whoever
closes, `cp` for one, and stay a plain file that may be written further. What does not claim to be one is a plain file.
A close says nothing while the file has gaps that nobody wrote, or is still open for another writer: `restic` closes a
file between two of its parts.
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
from kvfs.volume import Volume
from libsym.errors import Invalid, NoSpace, OverQuota, SymError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why some bytes are no image: their content does not become better by asking again."""

    content: PlainFile
    changes: int
    error: SymError

    @classmethod
    def of(cls, inode: Inode, error: SymError) -> Self | None:
        """The refusal to remember. A full pool is none: there may be room the next time."""
        if isinstance(error, Invalid) and isinstance(inode.content, PlainFile):
            return cls(inode.content, inode.content.changes, error)
        return None

    def still_holds(self, inode: Inode) -> bool:
        return inode.content is self.content and self.content.changes == self.changes

    def again(self) -> SymError:
        return Invalid(str(self.error))


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first bytes of a file, in memory; satisfies `ByteSource` as far as a header needs it."""

    data: bytes | memoryview
    size: int
    """Of the whole file."""

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def read_into(self, offset: int, room: memoryview) -> int:
        found = self.read_at(offset, len(room))
        room[: len(found)] = found
        return len(found)


async def take_in(volume: Volume, inode: Inode, disk: DiskWork, until_s: float) -> bool:
    """Make the file a KV file if it is an image, and say whether it was; raise if it claims to be one and is not.

    The caller sees to it that nobody writes to the file meanwhile. `until_s`: as long as that this waits for the disk
    to show the file's beginning; the rest has a deadline for each piece.
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
    plan = parse_header(volume.image_format, beginning)
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
    """Wait until there is room in memory, and take it."""
    await disk.leave()
    frames = await volume.room_for_import(plan, inode, surveyed)
    return volume.begin_import(plan, inode, surveyed, frames)
