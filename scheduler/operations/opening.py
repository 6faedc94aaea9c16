"""What ends an open: the handle, and a file that is on disk comes into memory behind it, where there is room."""

from __future__ import annotations

from kvfs.fs import FileSystem, OpenKv
from scheduler.connection.lip import Lip
from scheduler.replies import Reply


def opened(fs: FileSystem, lip: Lip, file: OpenKv) -> Reply:
    """The handle."""
    fs.volume.pager.will_need(file.table)
    return lip.opened(file)
