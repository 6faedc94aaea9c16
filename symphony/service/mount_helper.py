"""Mount helper: the only process with root's rights, which mounts for a daemon that has no such rights.

    python -m symphony.service.mount_helper --for USER DIR ...

A daemon in a hardened unit has a mount namespace of its own: it may not mount, and no other process would see its
mounts. So the daemon asks the helper. The helper opens /dev/fuse, mounts at one of the directories that its command
line names, passes the descriptor to the daemon, and keeps the connection. When the daemon ends in any way, the
connection ends. Then the helper unmounts, so that even a killed daemon leaves no stale mount.

A request is a packet with a JSON object, over a socket that the service manager made (LISTEN_FDS). Only USER may ask;
the kernel reports the peer's uid. The helper has no other input, and needs only CAP_SYS_ADMIN and the standard library:
this file is all of Symphony's code that root runs.

    {"do": "mount", "at": DIR}    -> {"ok": true} and the descriptor
    {"do": "keep", "at": DIR}     -> {"ok": true}: the daemon has that mount already, from a helper that ended
    {"do": "agreed"}              the kernel and the daemon have agreed on features (FUSE_INIT); there is no answer

A refusal is {"error": text, "errno": number}. When the helper ends, its mounts stay. The daemon keeps running, and asks
the next helper to keep its mount.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import pwd
import re
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_DESCRIPTOR = 3
"""First descriptor that a service manager passes on."""
SOURCE, KIND = "symphony", "fuse.kv"
"""Source and type of the daemons' mounts in the kernel's list.
A colon and a daemon's name may follow the source.
"""
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
"""Upper bound of simultaneous connections. A daemon has one, for as long as it has its mount."""
SO_PASSRIGHTS = 83
READ_AHEAD_KB = 512
"""Read-ahead of a mount. Images are read a quarter faster than with 128 KB, the kernel's default for FUSE."""
STALE_WITHIN_S = 2.0
"""Time after which a mount that does not answer counts as alive. A stale mount fails immediately."""

_MAX_DESCRIPTORS = 1024
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_OCTAL = re.compile(rb"\\([0-7]{3})")
"""Octal escape of a blank in a path of mountinfo."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Mounted:
    """The topmost mount at a directory, from the kernel's list."""

    device: str
    """Device number, as major:minor."""
    kind: str
    source: str
    user: int | None
    """The uid for which a FUSE file system was mounted. None: the mount is of another kind."""

    @property
    def is_ours(self) -> bool:
        return self.kind == KIND and (self.source == SOURCE or self.source.startswith(f"{SOURCE}:"))


class Helper:
    """The mount helper: serves one daemon for each of its directories."""

    def __init__(self, listening: socket.socket, uid: int, directories: list[str]) -> None:
        self._listening = listening
        self._uid = uid
        self._directories = directories
        self._kept: dict[socket.socket, tuple[str, str]] = {}
        """Directory and device of the mount that each connection has."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve requests until the process ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        if len(self._selector.get_map()) > MAX_CONNECTIONS:
            connection.close()  # keep descriptors free for mounts
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        """Handle one packet of a connection, or its end."""
        try:
            data = connection.recv(MAX_REQUEST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._answer(connection, data)
        else:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        """Unmount the mount of a connection, then close the connection.
        In this order, a client that waits for the close finds the directory unmounted.
        """
        self._selector.unregister(connection)
        directory, device = self._kept.pop(connection, ("", ""))
        if directory:
            found = mounted_at(directory)
            if found is not None and found.device == device:
                unmount(directory)
                say(f"unmounted {directory}")
        connection.close()

    def _answer(self, connection: socket.socket, data: bytes) -> None:
        try:
            self._require_user(connection)
            do, directory, source = _request(data)
            if do == "mount":
                self._mount(connection, directory, source)
            elif do == "keep":
                self._keep(connection, directory)
            elif connection in self._kept:
                set_read_ahead(self._kept[connection][1])
        except OSError as error:
            _refuse(connection, error)

    def _require_user(self, connection: socket.socket) -> None:
        uid, _ = _peer(connection)
        if uid != self._uid:
            raise OSError(errno.EPERM, f"only uid {self._uid} may ask for a mount, not uid {uid}")

    def _require_free(self, connection: socket.socket, directory: str) -> None:
        if directory not in self._directories:
            names = ", ".join(self._directories)
            raise OSError(errno.EPERM, f"{directory!r} is no mount point of the helper's: its unit names {names}")
        if connection in self._kept or any(directory == each for each, _ in self._kept.values()):
            raise OSError(errno.EBUSY, f"a daemon has the mount at {directory}: stop it first")

    def _mount(self, connection: socket.socket, directory: str, source: str) -> None:
        self._require_free(connection, directory)
        clear_stale(directory)
        fuse = open_fuse()
        try:
            mount(directory, source, fuse, *_peer(connection))
            try:
                device = _device_at(directory)
                _send(connection, {"ok": True}, fuse)
            except OSError:
                unmount(directory)
                raise
        finally:
            os.close(fuse)  # now the FUSE connection ends when the daemon closes its copy
        self._kept[connection] = directory, device
        say(f"mounted {directory} for uid {self._uid}")

    def _keep(self, connection: socket.socket, directory: str) -> None:
        self._require_free(connection, directory)
        found = mounted_at(directory)
        if found is None or not found.is_ours or found.user != self._uid:
            raise OSError(errno.ENOENT, f"there is no mount of uid {self._uid} at {directory}")
        self._kept[connection] = directory, found.device
        _send(connection, {"ok": True})
        say(f"keeps the mount at {directory}")


def _request(data: bytes) -> tuple[str, str, str]:
    """Parse a request into the action, the directory and the mount's source. OSError: the request is invalid."""
    try:
        found = json.loads(data)
        do, directory, source = found["do"], found.get("at", ""), found.get("source", SOURCE)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise OSError(errno.EINVAL, "that is no request") from None
    if do not in ("mount", "keep", "agreed") or not isinstance(directory, str):
        raise OSError(errno.EINVAL, "a request is one of mount, keep, agreed")
    if not (isinstance(source, str) and re.fullmatch(rf"{SOURCE}(:[!-~]+)?", source)):
        raise OSError(errno.EINVAL, f"a mount's source is {SOURCE}, or {SOURCE}:NAME without blanks")
    return do, directory, source


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the uid and gid of the process that connected. The kernel reports them."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid


def _refuse(connection: socket.socket, error: OSError) -> None:
    text = str(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    say(f"refused: {text}")
    with suppress(OSError):  # the client may be gone
        _send(connection, {"error": text, "errno": error.errno or errno.EIO})


def _send(connection: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    socket.send_fds(
        connection, [json.dumps(message).encode()], list(descriptors), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    )


def say(text: str) -> None:
    """Print a line of the log."""
    print(f"symphony-mount: {text}", file=sys.stderr, flush=True)


# Mounts


def open_fuse() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"/dev/fuse can't be opened: {error.strerror} (modprobe fuse)") from None


def mount(directory: str, source: str, fuse: int, uid: int, gid: int) -> None:
    """Mount at the directory itself, never at the target of a link. The kernel checks the modes of files there."""
    with suppress(FileExistsError):
        os.mkdir(directory, 0o755)  # noqa: PTH102 - an OSError must name the path unchanged
    where = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        real = os.readlink(f"/proc/self/fd/{where}")  # noqa: PTH115 - text is needed
        if real != directory:
            raise OSError(errno.ELOOP, f"{directory} is {real}, by a link on the way: name {real}")
        if _names_in(where, directory):
            raise OSError(errno.ENOTEMPTY, f"{directory} is not empty: choose another mount point")
        options = f"fd={fuse},rootmode=40000,user_id={uid},group_id={gid},allow_other,default_permissions"
        words = (source, f"/proc/self/fd/{where}", KIND)
        if _libc.mount(*map(str.encode, words), ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options.encode()):
            raise OSError(ctypes.get_errno(), f"can't mount at {directory}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(where)


def _names_in(where: int, directory: str) -> list[str]:
    try:
        return os.listdir(f"/proc/self/fd/{where}")  # noqa: PTH208 - by descriptor: the path may lead elsewhere by now
    except OSError as error:
        raise OSError(error.errno, f"can't look into {directory}: {error.strerror}") from None


def unmount(directory: str) -> None:
    """Unmount lazily, even while processes use the mount. A failure is only logged."""
    if _libc.umount2(os.fsencode(directory), _MNT_DETACH | _UMOUNT_NOFOLLOW):
        say(f"{directory} can't be unmounted: {os.strerror(ctypes.get_errno())}")


def clear_stale(directory: str) -> None:
    """Unmount the mounts that dead daemons left. OSError: a live daemon or another file system is mounted there."""
    while (found := mounted_at(directory)) is not None:
        if not found.is_ours:
            raise OSError(errno.EBUSY, f"something else is mounted at {directory} ({found.kind})")
        if not is_stale(directory):
            raise OSError(errno.EBUSY, f"a daemon serves the mount at {directory}: stop it first")
        say(f"{directory} is the mount of a daemon that is gone: unmounting it")
        unmount(directory)
        if mounted_at(directory) == found:
            raise OSError(errno.EBUSY, f"the stale mount at {directory} can't be taken away")


def is_stale(directory: str) -> bool:
    """Return whether the daemon of a mount is gone. A child process checks, since a hanging daemon blocks the check."""
    _bury()
    child = os.fork()
    if child == 0:
        status = 0
        os.closerange(FIRST_DESCRIPTOR, _MAX_DESCRIPTORS)  # a child that hangs must not keep connections open
        try:
            os.stat(directory)  # noqa: PTH116
        except OSError as error:
            status = int(error.errno in (errno.ENOTCONN, errno.ECONNABORTED))
        os._exit(status)
    pidfd = os.pidfd_open(child)
    try:
        with selectors.DefaultSelector() as ended:
            ended.register(pidfd, selectors.EVENT_READ)
            if not ended.select(STALE_WITHIN_S):
                os.kill(child, signal.SIGKILL)  # it may die later: the next check reaps it
                return False
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        os.close(pidfd)


def _bury() -> None:
    """Reap dead children of earlier checks that timed out."""
    with suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def mounted_at(directory: str) -> Mounted | None:
    """Return the topmost mount at a directory.
    None: there is no mount. The kernel's list has the mount, so no hanging daemon can block the call.
    """
    found, place = None, os.fsencode(directory)
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        head, _, tail = line.partition(b" - ")
        _, _, device, _, where, *_ = head.split(b" ")
        if _OCTAL.sub(lambda escape: bytes([int(escape[1], 8)]), where) == place:
            kind, source, options = os.fsdecode(tail).split(" ", 2)
            user = re.search(r"(?:^|,)user_id=(\d+)", options)
            found = Mounted(os.fsdecode(device), kind, source, int(user[1]) if user else None)
    return found


def _device_at(directory: str) -> str:
    """Return the device of the mount that was just made at a directory. OSError: the directory was moved meanwhile."""
    found = mounted_at(directory)
    if found is None:
        raise OSError(errno.ESTALE, f"{directory} was moved while it was mounted: try again")
    return found.device


def set_read_ahead(device: str) -> None:
    """Set the read-ahead of a mount. A failure is only logged."""
    try:
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KB), encoding="ascii")
    except OSError as error:
        say(f"read-ahead stays as it is: {error}")


# Start


def listening_socket() -> socket.socket:
    """Return the socket that the service manager made. SystemExit: there is no such socket."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        raise SystemExit("symphony-mount: a service manager starts this, with one socket: symphony-mount.socket")
    listening = socket.socket(fileno=FIRST_DESCRIPTOR)
    listening.set_inheritable(False)
    if (listening.family, listening.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise SystemExit("symphony-mount: the socket has to be ListenSequentialPacket=")
    refuse_descriptors(listening)
    return listening


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors that clients send, since a client can delay their close for any time.

    Linux before 6.16 can't refuse them. There, only the mode of the socket protects the helper: this mode admits the
    daemon's user alone.
    """
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _uid(user: str) -> int:
    try:
        return int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"there is no user {user}") from None


def _directory(path: str) -> str:
    """Parse the path of a directory, without access to the file system, which might hang. Links are not resolved."""
    if not path.startswith("/") or path == "/":
        raise argparse.ArgumentTypeError(f"{path} is no absolute path of a directory")
    return os.path.normpath(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="symphony-mount", description="Mounts for a daemon that has no rights.")
    parser.add_argument(
        "--for",
        dest="uid",
        metavar="USER",
        type=_uid,
        required=True,
        help="the daemon's user, who alone may ask for a mount",
    )
    parser.add_argument(
        "directories", metavar="DIR", type=_directory, nargs="+", help="directory where that user may have a mount"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    Helper(listening_socket(), args.uid, args.directories).run()


if __name__ == "__main__":
    main()
