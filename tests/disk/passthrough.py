"""Handlers that carry out the kernel's requests on the lower directory and write the log.

A request's handler is the method with its name; it gives the answer's bytes, or raises OSError. Before it changes
anything the rules look at it. Nothing is synced below: a power cut is simulated, and the machine keeps its power.
"""

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.disk.allocation import KEEP_SIZE, PUNCH_HOLE, allocate
from tests.disk.faults import Effect, Faults
from tests.disk.fuse import (
    DIRECT_IO,
    PARALLEL_DIRECT_WRITES,
    UNANSWERED,
    Opcode,
    Request,
    attributes_reply,
    directory_entry,
    entry_reply,
)
from tests.disk.log import (
    Allocated,
    Changed,
    Made,
    Operation,
    Punched,
    Removed,
    Renamed,
    Resized,
    Settled,
    Synced,
    Written,
)
from tests.disk.tree import BLOCK_BYTES, Node, Tree

_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_READ = struct.Struct("<QQIIQII")  # also of a write
_FALLOCATE = struct.Struct("<QQQII")
_STATFS = struct.Struct("<QQQQQIIII24x")
_OPENED = struct.Struct("<QIi")

_SETS_MODE, _SETS_UID, _SETS_GID, _SETS_SIZE = 1, 2, 4, 8
_SECTOR = 512


class Hung(Exception):
    """Raised by a rule: the request gets no answer for now."""


class PassThrough:
    def __init__(self, lower: Path, data: int) -> None:
        self.operations: list[Operation] = []
        self.data_bytes = 0
        self.faults = Faults()
        self.hung: list[Request] = []
        self.limit_bytes: int | None = None
        self._tree = Tree(lower)
        self._data = data
        self._directories: dict[int, list[bytes]] = {}
        self._last_directory = 0
        self._is_root = os.geteuid() == 0
        self._handlers: dict[int, Callable[[Request], bytes]] = {
            code: getattr(self, f"_{code.name.lower()}")
            for code in Opcode
            if code not in UNANSWERED and code not in {Opcode.INIT, Opcode.FLUSH}
        }
        assert not any(lower.iterdir()), "a log has all that is there"
        self._record(Settled())

    @property
    def used_bytes(self) -> int:
        return self._tree.used_bytes

    def answer(self, request: Request) -> bytes:
        """Do it. OSError: refused; Hung: it waits."""
        handler = self._handlers.get(request.opcode)
        if handler is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(request)

    def forget(self, request: Request) -> None:
        """Handle FORGET and BATCH_FORGET, which have no answer."""
        if request.opcode == Opcode.FORGET:
            self._tree.forget(request.node, struct.unpack_from("<Q", request.body)[0])
        elif request.opcode == Opcode.BATCH_FORGET:
            (count,) = struct.unpack_from("<I", request.body)
            for place in range(count):
                self._tree.forget(*struct.unpack_from("<QQ", request.body, 8 + 16 * place))

    def _gate(self, request: Request, operation: str, *paths: str) -> None:
        """Let the rules act on this operation: OSError or Hung."""
        if request.released:
            return
        rule = self.faults.look_at(operation, paths)
        if rule is None:
            return
        if rule.effect is Effect.HANG:
            self.hung.append(request.kept())
            raise Hung
        raise OSError(rule.errno, os.strerror(rule.errno))

    # What is recorded

    def _record(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _record_bytes(self, path: str, number: int, offset: int, data: memoryview | bytes) -> None:
        self._record(Written(path, number, offset, len(data), self.data_bytes))
        _write_all(self._data, data, self.data_bytes)
        self.data_bytes += len(data)

    def _record_made(self, path: str, parent: Node, name: str, node: Node, status: os.stat_result) -> None:
        self._record(Made(path, node.number, parent.number, name, status.st_mode, status.st_uid, status.st_gid))

    def _record_sync(self, request: Request, path: str, *, failed: bool) -> None:
        _, flags = struct.unpack_from("<QI", request.body)
        self._record(Synced(path, request.node, request.arrived, bool(flags & 1), failed))

    # Requests: names

    def _node(self, request: Request) -> Node:
        return self._tree.nodes[request.node]

    def _lookup(self, request: Request) -> bytes:
        (name,) = request.names()
        return self._entry(self._node(request), name)

    def _entry(self, parent: Node, name: str) -> bytes:
        node, status = self._tree.look_up(parent, name)
        return entry_reply(status, node.number)

    def _make(self, request: Request, operation: str, name: str, make: Callable[[int], None]) -> bytes:
        """A new name for a new file. `make` gets the directory's descriptor."""
        parent = self._node(request)
        path = self._tree.path(parent, name)
        self._gate(request, operation, path)
        if self.limit_bytes is not None and self._tree.used_bytes >= self.limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(parent.descriptor)
        if self._is_root:
            above = parent.status()
            gid = above.st_gid if above.st_mode & stat.S_ISGID else request.gid
            os.chown(name, request.uid, gid, dir_fd=parent.descriptor, follow_symlinks=False)
        node, status = self._tree.look_up(parent, name)
        self._record_made(path, parent, name, node, status)
        return entry_reply(status, node.number)

    def _mkdir(self, request: Request) -> bytes:
        (mode,) = struct.unpack_from("<I", request.body)
        (name,) = request.names(8)
        return self._make(request, "mkdir", name, lambda parent: os.mkdir(name, mode, dir_fd=parent))

    def _create(self, request: Request) -> bytes:
        flags, mode = struct.unpack_from("<II", request.body)
        (name,) = request.names(16)

        def make(parent: int) -> None:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o7777, dir_fd=parent))

        entry = self._make(request, "create", name, make)
        return entry + self._opened(self._tree.nodes[struct.unpack_from("<Q", entry)[0]], flags)

    def _unlink(self, request: Request) -> bytes:
        return self._remove(request, "unlink", os.unlink)

    def _rmdir(self, request: Request) -> bytes:
        return self._remove(request, "rmdir", os.rmdir)

    def _remove(self, request: Request, operation: str, remove: Callable[..., None]) -> bytes:
        (name,) = request.names()
        parent = self._node(request)
        path = self._tree.path(parent, name)
        self._gate(request, operation, path)
        number = self._number_at(parent, name)
        remove(name, dir_fd=parent.descriptor)
        assert number is not None
        self._record(Removed(path, number, parent.number, name))
        self._tree.name_lost(number)
        return b""

    def _number_at(self, parent: Node, name: str) -> int | None:
        try:
            return self._tree.number_of(os.stat(name, dir_fd=parent.descriptor, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def _rename(self, request: Request) -> bytes:
        (new_parent,) = struct.unpack_from("<Q", request.body)
        name, new_name = request.names(8)
        parent, target = self._node(request), self._tree.nodes[new_parent]
        path, new_path = self._tree.path(parent, name), self._tree.path(target, new_name)
        self._gate(request, "rename", path, new_path)
        number, other = self._number_at(parent, name), self._number_at(target, new_name)
        os.rename(name, new_name, src_dir_fd=parent.descriptor, dst_dir_fd=target.descriptor)
        assert number is not None
        self._record(Renamed(path, number, parent.number, name, new_path, target.number, new_name))
        if other is not None:
            self._tree.name_lost(other)
        return b""

    # Requests: attributes

    def _getattr(self, request: Request) -> bytes:
        return attributes_reply(self._node(request).status(), request.node)

    def _setattr(self, request: Request) -> bytes:
        fields = _SETATTR.unpack_from(request.body)
        valid, size, mode, uid, gid = fields[0], fields[3], fields[11], fields[13], fields[14]
        node = self._node(request)
        path = self._tree.path(node)
        self._gate(request, "truncate" if valid & _SETS_SIZE else "setattr", path)
        if valid & _SETS_SIZE:
            os.truncate(node.lower, size)
            self._tree.give_back(node.number, size)
            self._record(Resized(path, node.number, size))
        if valid & (_SETS_UID | _SETS_GID):
            os.chown(node.lower, uid if valid & _SETS_UID else -1, gid if valid & _SETS_GID else -1)
        if valid & _SETS_MODE:
            Path(node.lower).chmod(stat.S_IMODE(mode))
        status = node.status()
        if valid & (_SETS_UID | _SETS_GID | _SETS_MODE):
            self._record(Changed(path, node.number, status.st_mode, status.st_uid, status.st_gid))
        return attributes_reply(status, node.number)

    def _statfs(self, request: Request) -> bytes:
        below = os.statvfs(self._tree.lower)
        blocks, free = below.f_blocks * below.f_frsize // BLOCK_BYTES, below.f_bavail * below.f_frsize // BLOCK_BYTES
        if self.limit_bytes is not None:
            blocks = self.limit_bytes // BLOCK_BYTES
            free = max(0, self.limit_bytes - self._tree.used_bytes) // BLOCK_BYTES
        return _STATFS.pack(blocks, free, free, below.f_files, below.f_ffree, BLOCK_BYTES, 255, BLOCK_BYTES, 0)

    # Requests: open files. The kernel's handle is the descriptor of the lower file.

    def _open(self, request: Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        node = self._node(request)
        self._gate(request, "open", self._tree.path(node))
        return self._opened(node, flags)

    def _opened(self, node: Node, flags: int) -> bytes:
        handle = os.open(node.lower, flags & os.O_ACCMODE)
        node.num_open += 1
        return _OPENED.pack(handle, DIRECT_IO | (PARALLEL_DIRECT_WRITES if flags & os.O_DIRECT else 0), 0)

    def _release(self, request: Request) -> bytes:
        (handle,) = struct.unpack_from("<Q", request.body)
        os.close(handle)
        node = self._node(request)
        node.num_open -= 1
        self._tree.name_lost(node.number)
        return b""

    def _read(self, request: Request) -> bytes:
        handle, offset, size, _, _, flags, _ = _READ.unpack_from(request.body)
        self._gate(request, "read", self._tree.path(self._node(request)))
        _check_alignment(flags, offset, size)
        return os.pread(handle, size, offset)

    def _write(self, request: Request) -> bytes:
        handle, offset, size, _, _, flags, _ = _READ.unpack_from(request.body)
        node = self._node(request)
        path = self._tree.path(node)
        self._gate(request, "write", path)
        _check_alignment(flags, offset, size)
        room = self._room_for(node, offset, size)
        if size and not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = request.body[_READ.size : _READ.size + room]
        _write_all(handle, data, offset)
        self._tree.take(node.number, self._tree.needs(node.number, offset, room))
        self._record_bytes(path, node.number, offset, data)
        return struct.pack("<II", room, 0)

    def _room_for(self, node: Node, offset: int, size: int) -> int:
        """How many bytes of this write fit below the limit."""
        if self.limit_bytes is None:
            return size
        free = self.limit_bytes - self._tree.used_bytes
        for start, end in self._tree.needs(node.number, offset, size):
            if end - start > free:
                return max(0, start + max(0, free) // BLOCK_BYTES * BLOCK_BYTES - offset)
            free -= end - start
        return size

    def _fallocate(self, request: Request) -> bytes:
        handle, offset, size, mode, _ = _FALLOCATE.unpack_from(request.body)
        node = self._node(request)
        path = self._tree.path(node)
        if mode not in (0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        punches = bool(mode & PUNCH_HOLE)
        self._gate(request, "punch" if punches else "allocate", path)
        if not punches and self._room_for(node, offset, size) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(handle, mode, offset, size)
        if punches:
            self._tree.give_back(node.number, offset, offset + size)
            self._record(Punched(path, node.number, offset, size))
        else:
            self._tree.take(node.number, self._tree.needs(node.number, offset, size))
            self._record(Allocated(path, node.number, offset, size, bool(mode & KEEP_SIZE)))
        return b""

    def _fsync(self, request: Request) -> bytes:
        return self._sync(request, "fsync")

    def _fsyncdir(self, request: Request) -> bytes:
        return self._sync(request, "fsyncdir")

    def _sync(self, request: Request, operation: str) -> bytes:
        path = self._tree.path(self._node(request))
        try:
            self._gate(request, operation, path)
        except OSError:
            self._record_sync(request, path, failed=True)
            raise
        self._record_sync(request, path, failed=False)
        return b""

    # Requests: directories

    def _opendir(self, request: Request) -> bytes:
        self._last_directory += 1
        self._directories[self._last_directory] = []
        return _OPENED.pack(self._last_directory, 0, 0)

    def _readdir(self, request: Request) -> bytes:
        handle, offset, size, *_ = _READ.unpack_from(request.body)
        if offset == 0:  # opened just now, or rewound
            self._directories[handle] = list(self._list(self._node(request)))
        answer = bytearray()
        for entry in self._directories[handle][offset:]:
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return bytes(answer)

    def _list(self, directory: Node) -> Iterator[bytes]:
        device = directory.status().st_dev
        yield directory_entry(directory.number, 1, 4, b".")
        yield directory_entry(directory.number, 2, 4, b"..")
        with os.scandir(directory.lower) as entries:
            for offset, entry in enumerate(entries, start=3):
                number = self._tree.number_of_inode(device, entry.inode())
                kind = 10 if entry.is_symlink() else 4 if entry.is_dir(follow_symlinks=False) else 0
                yield directory_entry(number, offset, kind, os.fsencode(entry.name))

    def _releasedir(self, request: Request) -> bytes:
        (handle,) = struct.unpack_from("<Q", request.body)
        del self._directories[handle]
        return b""


def _check_alignment(flags: int, offset: int, size: int) -> None:
    if flags & os.O_DIRECT and (offset | size) % _SECTOR:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
