"""When a plain file becomes a KV file: as soon as its bytes are a whole, valid image.

The kernel sends a FLUSH at every close of a duplicated descriptor (`cat a > b` closes one before its first byte is
written), so a test that fails is not the end: bytes that claim to be an image and are none give an error to whoever
closes, `cp` for one, and stay a plain file that may be written further. What does not claim to be one is a plain file.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

from kvfs.images.format import CLAIM_BYTES, claims_to_be_image
from kvfs.images.header import parse_header
from kvfs.mount.eager import Eager
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.volume import Volume
from libsym.errors import Invalid, NoSpace, OverQuota, SymError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why some bytes are no image: their content does not become better by asking again."""

    changes: int
    error: SymError

    @classmethod
    def of(cls, inode: Inode, error: SymError) -> Self | None:
        """The refusal to remember. A full pool is none: there may be room the next time."""
        if isinstance(error, Invalid) and isinstance(inode.content, PlainFile):
            return cls(inode.content.changes, error)
        return None

    def still_holds(self, inode: Inode) -> bool:
        return isinstance(inode.content, PlainFile) and inode.content.changes == self.changes

    def again(self) -> SymError:
        return Invalid(str(self.error))


async def take_in(volume: Volume, inode: Inode, eager: Eager) -> bool:
    """Make the file a KV file if it is an image, and say whether it was; raise if it claims to be one and is not.

    The caller sees to it that nobody writes to the file meanwhile.
    """
    content = inode.content
    if not isinstance(content, PlainFile):
        return False
    if not claims_to_be_image(content.read_at(0, CLAIM_BYTES), content.size):
        return False
    try:
        await _import(volume, inode, content, eager)
    except SymError as error:
        log.info("%s stays a plain file: %s", volume.tree.path_of(inode), error)
        raise
    return True


async def _import(volume: Volume, inode: Inode, content: PlainFile, eager: Eager) -> None:
    plan = parse_header(volume.image_format, content)
    try:
        incoming = volume.begin_import(plan, inode)
    except (NoSpace, OverQuota):
        surveyed = await eager.long_job(volume.survey_import(plan, inode), content)
        incoming = volume.begin_import(plan, inode, surveyed)
    try:
        await eager.long_job(incoming.load, content)
    except BaseException:
        volume.abandon_import(incoming, inode)
        raise
    volume.finish_import(incoming, inode)
