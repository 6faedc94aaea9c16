"""The one part of Symphony that has root's rights: it mounts for a daemon that has none.

    python -m symphony.service.mount_helper --for USER DIR ...

A daemon in a hardened unit has a mount namespace of its own: what it mounted nobody else would see, and it may not
mount anyway. So it asks here. The helper opens /dev/fuse, mounts at one of the directories that its command line names,
passes the descriptor on, and keeps the connection. When that ends, by whatever end of the daemon, it unmounts: a daemon
that is killed leaves no stale mount.

It is asked by packets, each a JSON object, over a socket that a service manager made (LISTEN_FDS); only by USER, who is
the kernel's word; and reads nothing else. It needs CAP_SYS_ADMIN alone, and nothing but the standard library: all that
root runs is this file.

    {"do": "mount", "at": DIR}    -> {"ok": true} and the descriptor
    {"do": "keep", "at": DIR}     -> {"ok": true}: the daemon has that mount already, of a helper that ended
    {"do": "agreed"}              the kernel has asked what the daemon can do; there is no answer

Else the answer is {"error": text, "errno": number}. The end of the helper unmounts nothing: the daemon goes on, and
asks the next helper to keep its mount.
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
"""Of those that a service manager hands over."""
SOURCE, KIND = "symphony", "fuse.kv"
"""As which the kernel's list of mounts has ours; behind a colon the daemon says which of them it is."""
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
"""At once. A daemon has one, for as long as its mount."""
SO_PASSRIGHTS = 83
READ_AHEAD_KB = 512
"""In place of the 128 that the kernel offers to FUSE: images are read a quarter faster."""
STALE_WITHIN_S = 2.0
"""A mount whose daemon is gone says so at once; one that says nothing for so long has a daemon."""

_MAX_DESCRIPTORS = 1024
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_OCTAL = re.compile(rb"\\([0-7]{3})")
"""How mountinfo writes blanks in paths."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Mounted:
    """What the kernel says of the topmost mount at a directory."""

    device: str
    """major:minor"""
    kind: str
    source: str
    user: int | None
    """The uid that it was mounted for, if it is a FUSE file system."""

    @property
    def is_ours(self) -> bool:
        return self.kind == KIND and (self.source == SOURCE or self.source.startswith(f"{SOURCE}:"))


class Helper:
    """Serves one daemon for each directory."""

    def __init__(self, listening: socket.socket, uid: int, directories: list[str]) -> None:
        self._listening = listening
        self._uid = uid
        self._directories = directories
        self._kept: dict[socket.socket, tuple[str, str]] = {}
        """The directory and the device of what each connection has."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """For ever."""
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
            connection.close()  # or there were no descriptors left for a mount
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        """One packet, or the end."""
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
        """Whoever waits for the end of the connection finds the directory unmounted."""
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
            os.close(fuse)  # with the daemon's own copy the connection to the kernel ends
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
    """The action, the place, and the mount's source. OSError: the bytes are no request."""
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
    """Who connected, uid and gid, by the kernel's word."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid


def _refuse(connection: socket.socket, error: OSError) -> None:
    text = str(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    say(f"refused: {text}")
    with suppress(OSError):  # who asked has gone
        _send(connection, {"error": text, "errno": error.errno or errno.EIO})


def _send(connection: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    socket.send_fds(
        connection, [json.dumps(message).encode()], list(descriptors), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    )


def say(text: str) -> None:
    """A line of the log."""
    print(f"symphony-mount: {text}", file=sys.stderr, flush=True)


# What the kernel does


def open_fuse() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"/dev/fuse can't be opened: {error.strerror} (modprobe fuse)") from None


def mount(directory: str, source: str, fuse: int, uid: int, gid: int) -> None:
    """At the directory itself, never at what a link leads to. Modes decide who may do what there."""
    with suppress(FileExistsError):
        os.mkdir(directory, 0o755)  # noqa: PTH102 - an OSError with the path as it is
    where = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        real = os.readlink(f"/proc/self/fd/{where}")  # noqa: PTH115 - the path as text
        if real != directory:
            raise OSError(errno.ELOOP, f"{directory} is {real}, by a link on the way: name that one")
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
        return os.listdir(f"/proc/self/fd/{where}")  # noqa: PTH208 - not through the path once more
    except OSError as error:
        raise OSError(error.errno, f"can't look into {directory}: {error.strerror}") from None


def unmount(directory: str) -> None:
    """Also while somebody is in it."""
    if _libc.umount2(os.fsencode(directory), _MNT_DETACH | _UMOUNT_NOFOLLOW):
        say(f"{directory} can't be unmounted: {os.strerror(ctypes.get_errno())}")


def clear_stale(directory: str) -> None:
    """Take away what daemons have left that are gone. OSError: something else is there."""
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
    """Whether no daemon answers for the mount there. A child looks: a daemon that hangs would hold it up."""
    _bury()
    child = os.fork()
    if child == 0:
        status = 0
        os.closerange(FIRST_DESCRIPTOR, _MAX_DESCRIPTORS)  # should it stay, nobody waits for what it has
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
                os.kill(child, signal.SIGKILL)  # it dies when it can, and is buried before the next one looks
                return False
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        os.close(pidfd)


def _bury() -> None:
    """Children that were given up, and have died."""
    with suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def mounted_at(directory: str) -> Mounted | None:
    """From the kernel's list: no mount is touched."""
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
    """Of what has just been mounted there."""
    found = mounted_at(directory)
    if found is None:
        raise OSError(errno.ESTALE, f"{directory} was moved while it was mounted: try again")
    return found.device


def set_read_ahead(device: str) -> None:
    """No more than a wish."""
    try:
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KB), encoding="ascii")
    except OSError as error:
        say(f"read-ahead stays as it is: {error}")


# How it is started


def listening_socket() -> socket.socket:
    """The one that the service manager has made."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        raise SystemExit("symphony-mount: a service manager starts this, with one socket: symphony-mount.socket")
    listening = socket.socket(fileno=FIRST_DESCRIPTOR)
    listening.set_inheritable(False)
    if (listening.family, listening.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise SystemExit("symphony-mount: the socket has to be ListenSequentialPacket=")
    refuse_descriptors(listening)
    return listening


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors that are sent here: closing one may take as long as its sender likes.

    Linux before 6.16 can't. There the mode of the socket lets nobody but the daemon's user in.
    """
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _uid(user: str) -> int:
    try:
        return int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"there is no user {user}") from None


def _directory(path: str) -> str:
    """As the kernel's list of mounts would have it: nothing is asked of a file system that might not answer."""
    if not path.startswith("/") or path == "/":
        raise argparse.ArgumentTypeError(f"{path} is no absolute path of a directory")
    return os.path.normpath(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="symphony-mount", description="Mounts for a daemon that has no rights.")
    parser.add_argument("--for", dest="uid", metavar="USER", type=_uid, required=True, help="who may ask")
    parser.add_argument("directories", metavar="DIR", type=_directory, nargs="+", help="where it may mount")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    Helper(listening_socket(), args.uid, args.directories).run()


if __name__ == "__main__":
    main()
