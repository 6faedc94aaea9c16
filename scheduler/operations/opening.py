"""What ends an open: a file that is on disk alone comes into memory before the program has a handle on it."""

from __future__ import annotations

from kvfs.fs import FileSystem, OpenKv
from scheduler.connection.lip import Lip
from scheduler.operations.operation import Outcome
from scheduler.replies import Reply


def opened(fs: FileSystem, lip: Lip, file: OpenKv) -> Outcome:
    """The handle, at once if the file is in memory."""
    return lip.opened(file) if fs.is_here(file) else brought(fs, lip, file)


async def brought(fs: FileSystem, lip: Lip, file: OpenKv) -> Reply:
    """The handle, when the file is in memory."""
    return lip.opened(file if fs.is_here(file) else await fs.bring(file))
