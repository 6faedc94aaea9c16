"""The control files: `.symphony` in the root of the mount. A lookup finds `.symphony`, but listings of the root leave
it out.

    model, metrics          the default model, and how the daemon is doing
    models/NAME             each model that the daemon serves
    proc/PID/status         one connected program; readable by its owner alone
    text/...                mirrors the directories and KV files of the mount; a file's bytes are its context as text

The daemon stores no control file. An inode number alone identifies its control file, so the daemon keeps no table of
the numbers that the kernel knows. A request about a program or KV file that is gone gets an error.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from kvfs.control.documents import Documents
from kvfs.control.handles import ControlHandle, Document, TextHandle, not_at_end
from kvfs.control.sources import ControlFiles
from kvfs.control.text_view import TextView
from kvfs.control.text_writer import TextWriter
from kvfs.fs import FileSystem
from kvfs.names.content import OWN, KvFile
from kvfs.names.inode import Credentials, Inode, shown
from kvfs.names.order import FIRST_PLACE
from kvfs.names.tree import CONTROL_NAME, ROOT_NUMBER, require_directory
from kvfs.pages.holdings import Holdings, Kind
from libsym.errors import Busy, Exists, IsDirectory, NotFound, NotPermitted, SymError

CONTROL_ROOT = 1 << 62
"""The lowest inode number of control files, and the lowest number of their handles."""

_MODEL, _METRICS, _PROCESSES, _MODELS = CONTROL_ROOT + 1, CONTROL_ROOT + 2, CONTROL_ROOT + 3, CONTROL_ROOT + 4
_FIRST_MODEL = CONTROL_ROOT + 256
"""Inode number of the first file in `models`. The files of further models have the next numbers."""
_TEXT_BIT = 1 << 61
_PROCESS_BIT = 1 << 60
_TEXT = CONTROL_ROOT | _TEXT_BIT
"""Base of the inode numbers of texts. The number of a text is this base plus the number of the inode that it mirrors.
"""
_PROCESS = CONTROL_ROOT | _PROCESS_BIT
"""Base of the inode numbers below `proc`. The number of a directory is this base plus twice the process number. The
`status` in the directory has the next number.
"""
_TEXT_ROOT = _TEXT + ROOT_NUMBER

_FIXED = {b"model": _MODEL, b"metrics": _METRICS, b"proc": _PROCESSES, b"text": _TEXT_ROOT, b"models": _MODELS}
_STATUS = b"status"

_DIRECTORY, _FILE = stat.S_IFDIR, stat.S_IFREG
_DIRECTORY_BYTES = 4096


class Attributes(NamedTuple):
    """The answer of `stat(2)`."""

    number: int
    mode: int
    """The mode, with the file type."""
    nlink: int
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class ControlTree:
    """Every control file of one mount, by inode number. The trio thread owns the tree."""

    def __init__(self, fs: FileSystem, files: ControlFiles) -> None:
        self._fs = fs
        self._tree = fs.volume.tree
        self._files = files
        self._view = TextView(files)
        self._documents = Documents()
        self._since_ns = time.time_ns()
        self._handles: set[ControlHandle] = set()

    # Names and attributes

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of the file with that name, including `.`, `..` and the root's `.symphony`."""
        if parent == ROOT_NUMBER and name == CONTROL_NAME:
            return self.attributes(CONTROL_ROOT)
        number = parent if name == b"." else self._parent(parent) if name == b".." else self._child(parent, name)
        if number == ROOT_NUMBER:
            raise NotFound("the way out of the control files leads through the root of the mount")
        return self.attributes(number)

    def attributes(self, number: int) -> Attributes:
        """Return the answer of `stat(2)` for a control file, or raise NotFound."""
        if number & _TEXT_BIT:
            return self._text_attributes(number)
        if number & _PROCESS_BIT:
            return self._process_attributes(number)
        if number in {CONTROL_ROOT, _PROCESSES, _MODELS}:
            num_directories = {CONTROL_ROOT: 3, _PROCESSES: len(self._files.processes())}.get(number, 0)
            return self._of_the_daemon(number, _DIRECTORY | 0o555, 2 + num_directories, _DIRECTORY_BYTES)
        return self._of_the_daemon(number, _FILE | 0o444, 1, len(self._document(number)()))

    def end_of_listing(self, number: int) -> int:
        """Return the place that follows the last name in the directory now."""
        return self._tree.order(self._mirrored(number)).end if number & _TEXT_BIT else CONTROL_ROOT

    def listing(self, number: int, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
        """Yield place, name and inode number of each directory entry with a place from `start` to `end - 1`, without
        `.` and `..`.
        """
        if number & _TEXT_BIT:
            found = self._tree.order(self._mirrored(number)).between(start, end)
            return ((place, name, _TEXT + inode.number) for place, name, inode in found if _is_mirrored(inode))
        return ((place, name, found) for place, name, found in self._own_names(number) if start <= place < end)

    def _own_names(self, number: int) -> list[tuple[int, bytes, int]]:
        """Return place, name and inode number of every entry of a directory outside the text view."""
        if number == CONTROL_ROOT:
            return [(place, *each) for place, each in enumerate(_FIXED.items(), FIRST_PLACE)]
        if number == _PROCESSES:
            pids = sorted(self._files.processes())
            return [(FIRST_PLACE + pid, b"%d" % pid, _PROCESS + 2 * pid) for pid in pids]
        if number == _MODELS:
            return [(FIRST_PLACE + at, name, _FIRST_MODEL + at) for at, name in enumerate(self._files.models())]
        if number & _PROCESS_BIT and not number & 1:
            self._process(number)
            return [(FIRST_PLACE, _STATUS, number + 1)]
        raise NotFound(f"control file {number - CONTROL_ROOT} is not a directory")

    def inode_behind(self, number: int) -> Inode:
        """Return the inode that a file or directory of the text view mirrors. Other control files can't be changed."""
        if number & _TEXT_BIT:
            return self._mirrored(number)
        raise NotPermitted("control files can't be changed")

    def inode_around(self, number: int) -> Inode:
        """Return the inode whose space `statfs(2)` shows. For a text, return the inode that the text mirrors. For any
        other control file, return the root.
        """
        return self._mirrored(number) if number & _TEXT_BIT else self._tree.root

    def truncate(self, number: int, size: int) -> None:
        """Shorten a text as `truncate(2)` does. Entries are kept whole."""
        inode = self.inode_behind(number)
        kv = self._mirrored_kv(inode)
        if any(isinstance(handle, TextHandle) and handle.is_writing(inode) for handle in self._handles):
            raise Busy(f"{self._tree.path_of(inode)}: text is being written to it")
        if size > self._view.size(kv):
            raise not_at_end(self._tree.path_of(inode))
        if size < self._view.size(kv):
            self._fs.volume.truncate_kv(kv, self._view.entries_within(kv, size), self._tree.path_of(inode))
            inode.modified()

    # Open files

    async def open(self, number: int, flags: int, uid: int, pid: int) -> ControlHandle:
        """Open a file for process `pid` of `uid`. The kernel has checked the permission."""
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if number & _TEXT_BIT:
            return await self._open_text(number, flags, uid, pid, writes=writes)
        if writes or flags & os.O_TRUNC:
            raise NotPermitted("control files can't be changed")
        return self._keep(Document(self._document(number), partial(self._documents.hold, uid), self._handles.discard))

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, creds: Credentials, pid: int
    ) -> tuple[ControlHandle, Attributes]:
        """Make an empty KV file under a new name in the text view, and open its text for writing."""
        directory = self.inode_behind(parent)
        require_directory(directory, name)
        if _is_scratch(name, flags):
            raise NotPermitted(
                f"{shown(name)}: the text view takes no temporary files of editors: write a new text with O_WRONLY"
            )
        existing = directory.entries.get(name)
        if existing is not None and not flags & os.O_EXCL:
            if _is_mirrored(existing):  # made since the kernel's lookup, so ESTALE makes the kernel repeat the lookup
                raise SymError("the name was made meanwhile", errno.ESTALE)
            raise Exists(f"{shown(name)}: a file that is no KV file has this name")
        holdings = self._writer_of(creds.uid)
        opened = self._fs.kv_create_in(creds, directory, name, mode & 0o600)
        writer = TextWriter(self._fs, self._files, opened, holdings, is_new=True, pid=pid)
        handle = self._keep(self._text_handle(opened.inode, writer, appends=bool(flags & os.O_APPEND)))
        return handle, self.attributes(_TEXT + opened.inode.number)

    def close(self) -> None:
        """Close every handle, because the mount is gone."""
        for handle in tuple(self._handles):
            handle.close()

    def _keep(self, handle: ControlHandle) -> ControlHandle:
        self._handles.add(handle)
        return handle

    def _writer_of(self, uid: int) -> Holdings:
        """Return the holdings of the user. Raise OverQuota if the user may have no further text open for writing."""
        holdings = self._fs.pool.accounts.of(uid).holdings
        holdings.require(Kind.TEXT)
        return holdings

    async def _open_text(self, number: int, flags: int, uid: int, pid: int, *, writes: bool) -> ControlHandle:
        inode = self._mirrored(number)
        self._tree.require_open(inode, writable=writes)
        self._mirrored_kv(inode)
        if not writes:
            return self._keep(self._text_handle(inode, None, appends=False))
        holdings = self._writer_of(uid)
        if flags & os.O_TRUNC:
            self._fs.volume.empty_kv(inode)
        opened = self._fs.kv_open_inode(inode, write=True)
        self._fs.volume.pager_of(opened.table).will_need(opened.table)
        writer = TextWriter(self._fs, self._files, opened, holdings, is_new=False, pid=pid)
        return self._keep(self._text_handle(inode, writer, appends=bool(flags & os.O_APPEND)))

    def _text_handle(self, inode: Inode, writer: TextWriter | None, *, appends: bool) -> TextHandle:
        return TextHandle(self._fs, self._view, inode, writer, self._handles.discard, appends=appends)

    # Parts

    def _child(self, parent: int, name: bytes) -> int:
        if parent & _TEXT_BIT:
            inode = self._tree.child(self._mirrored(parent), name)
            if _is_mirrored(inode):
                return _TEXT + inode.number
        elif parent == CONTROL_ROOT and name in _FIXED:
            return _FIXED[name]
        elif parent == _PROCESSES and name.isdigit() and b"%d" % int(name) == name:
            if int(name) in self._files.processes():
                return _PROCESS + 2 * int(name)
        elif parent == _MODELS and name in (names := self._files.models()):
            return _FIRST_MODEL + names.index(name)
        elif parent & _PROCESS_BIT and not parent & 1 and name == _STATUS:
            return parent + 1
        raise NotFound(f"{shown(name)}: there is no such control file")

    def _parent(self, number: int) -> int:
        if number == CONTROL_ROOT:
            return ROOT_NUMBER
        if number & _TEXT_BIT and number != _TEXT_ROOT:
            return _TEXT + self._tree.child(self._mirrored(number), b"..").number
        return _PROCESSES if number & _PROCESS_BIT else CONTROL_ROOT  # only directories are asked

    def _mirrored(self, number: int) -> Inode:
        return self._tree.get(number - _TEXT)

    def _mirrored_kv(self, inode: Inode) -> KvFile:
        if not isinstance(inode.content, KvFile):  # emptied or removed since the kernel's lookup
            raise SymError(f"inode {inode.number} is no KV file any more", errno.ESTALE)
        return inode.content

    def _text_attributes(self, number: int) -> Attributes:
        inode = self._mirrored(number)
        size = _DIRECTORY_BYTES if inode.is_directory else self._view.size(self._mirrored_kv(inode))
        return Attributes(
            number,
            inode.file_type | inode.mode,
            inode.nlink,
            inode.uid,
            inode.gid,
            size,
            inode.atime_ns,
            inode.mtime_ns,
            inode.ctime_ns,
        )

    def _process(self, number: int) -> int:
        """Return the process number of a `proc` directory or of its `status`, or raise NotFound."""
        pid = (number - _PROCESS) // 2
        if pid not in self._files.processes():
            raise NotFound(f"process {pid} is not connected any more")
        return pid

    def _status(self, pid: int, since_ns: int) -> str:
        """Return the status of the program that began at `since_ns`. Raise NotFound if by now another program has this
        process number.
        """
        process = self._files.processes().get(pid)
        if process is None or process.since_ns != since_ns:
            raise NotFound(f"process {pid} is not connected any more")
        return self._files.status(pid)

    def _process_attributes(self, number: int) -> Attributes:
        process = self._files.processes()[self._process(number)]
        is_status = bool(number & 1)
        mode, nlink = (_FILE | 0o400, 1) if is_status else (_DIRECTORY | 0o500, 2)
        size = len(self._document(number)()) if is_status else _DIRECTORY_BYTES
        since = process.since_ns
        now = time.time_ns() if is_status else since
        return Attributes(number, mode, nlink, process.uid, process.gid, size, now, now, since)

    def _of_the_daemon(self, number: int, mode: int, nlink: int, size: int) -> Attributes:
        root = self._tree.root
        now = time.time_ns() if number == _METRICS else self._since_ns
        return Attributes(number, mode, nlink, root.uid, root.gid, size, now, now, self._since_ns)

    def _document(self, number: int) -> Callable[[], bytes]:
        """Return the function that makes the bytes of a control file."""
        if number == _MODEL:
            return partial(self._documents.get, _MODEL, partial(self._files.model, 0))
        if not number & (_TEXT_BIT | _PROCESS_BIT) and 0 <= number - _FIRST_MODEL < len(self._files.models()):
            return partial(self._documents.get, number, partial(self._files.model, number - _FIRST_MODEL))
        if number == _METRICS:
            return partial(self._documents.get, _METRICS, self._files.metrics)
        if number & _PROCESS_BIT and number & 1:
            pid = self._process(number)
            since_ns = self._files.processes()[pid].since_ns
            return partial(self._documents.get, (pid, since_ns), partial(self._status, pid, since_ns))
        if number in {CONTROL_ROOT, _PROCESSES, _MODELS} or number & _PROCESS_BIT:
            raise IsDirectory("a directory has no bytes")
        raise NotFound(f"there is no control file {number - CONTROL_ROOT}")


def _is_scratch(name: bytes, flags: int) -> bool:
    """Whether a new file is a temporary, swap or backup file of a program that saves another file.

    Such a file has one of three signs: the program opens it for reading, too, refuses links, or gives it a typical
    name. Files of mkstemp have the first two signs, and files of vim have one of these two. A text that a program
    writes has none of the three. The text view can't remove files, so it refuses to make temporary files. The program
    then makes the file elsewhere, or reports the error.
    """
    is_read = flags & os.O_ACCMODE != os.O_WRONLY
    return bool(is_read or flags & os.O_NOFOLLOW or name.endswith(b"~") or (name[:1] == name[-1:] == b"#"))


def _is_mirrored(inode: Inode) -> bool:
    return inode.is_directory or (isinstance(inode.content, KvFile) and inode.content.identity == OWN)
