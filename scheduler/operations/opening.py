"""The last part of an open: give the program a handle, and hint to the pager that the file's pages are needed."""

from __future__ import annotations

from kvfs.fs import FileSystem, OpenKv
from scheduler.connection.lip import Lip
from scheduler.wire.replies import Reply


def opened(fs: FileSystem, lip: Lip, file: OpenKv) -> Reply:
    """Return the reply with a new handle on the file, and hint that its pages are needed."""
    fs.volume.pager_of(file.table).will_need(file.table)
    return lip.opened(file)
