# ruff: noqa: PTH102, PTH208, PTH211 - the system calls are what is tested
"""Operations of scripts: the letters of their arguments, see `script`, and the system calls that they are."""

import ctypes
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW = -100, 0x100

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextmanager
def _opened(path: str, flags: int, *mode: int) -> Iterator[int]:
    handle = os.open(path, flags, *mode)
    try:
        yield handle
    finally:
        os.close(handle)


def _make(kind: str, path: str) -> None:
    """A file of a kind, as most cases need one."""
    match kind:
        case "regular":
            _open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK, 0o644)
        case "dir":
            os.mkdir(path, 0o755)
        case "symlink":
            os.symlink("test", path)
        case "socket":
            _bind(path)
        case "fifo" | "block" | "char":
            os.mknod(path, {"fifo": stat.S_IFIFO, "block": stat.S_IFBLK, "char": stat.S_IFCHR}[kind] | 0o644, 0x102)


def _open(path: str, flags: int, mode: int = 0o777) -> None:
    os.close(os.open(path, flags, mode))


def _mknod(path: str, kind: int, mode: int, major: int = 0, minor: int = 0) -> None:
    os.mknod(path, kind | mode, os.makedev(major, minor))


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)


def _renameat2(old: str, new: str, flags: int) -> None:
    _check(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))


def _ls(path: str) -> None:
    """List a directory with attributes, so that it has to be searchable too."""
    for name in [".", *os.listdir(path)]:
        os.lstat(f"{path}/{name}")


def _read(path: str) -> bytes:
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as handle:  # lest a fifo stops us
        return os.read(handle, 1 << 20)


def _write(path: str, data: str, flags: int = 0) -> None:
    with _opened(path, os.O_WRONLY | os.O_NONBLOCK | flags) as handle:
        os.write(handle, data.encode())


def _utimens(path: str, *times: str, flags: int = 0) -> None:
    _check(_libc.utimensat(_AT_FDCWD, os.fsencode(path), _timespecs(*times), flags))


def _timespecs(*words: str) -> Any:
    """Two times: seconds.nanoseconds, `now` or `omit`; two times `null` for none at all."""
    if words == ("null", "null"):
        return None
    times = (_Timespec * 2)()
    for i, word in enumerate(words):
        text = {"now": f"0.{_UTIME_NOW}", "omit": f"0.{_UTIME_OMIT}"}.get(word, word)
        seconds, _, nanoseconds = text.partition(".")
        times[i] = _Timespec(int(seconds), int(nanoseconds or "0"))
    return times


OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    # p a path, m a mode in octal, i a number, u a user or group, f flags, t a type, s a word, h a handle's name
    "make": ("sp", _make),
    "open": ("pfm", _open),
    "mkdir": ("pm", os.mkdir),
    "mkfifo": ("pm", os.mkfifo),
    "mknod": ("ptmii", _mknod),
    "bind": ("p", _bind),
    "symlink": ("sp", os.symlink),
    "link": ("pp", lambda old, new: os.link(old, new, follow_symlinks=False)),
    "unlink": ("p", os.unlink),
    "rmdir": ("p", os.rmdir),
    "rename": ("pp", os.rename),
    "renameat2": ("ppf", _renameat2),
    "chmod": ("pm", os.chmod),
    "chown": ("puu", os.chown),
    "lchown": ("puu", os.lchown),
    "truncate": ("pi", os.truncate),
    "utimens": ("pss", _utimens),
    "lutimens": ("pss", lambda path, *times: _utimens(path, *times, flags=_AT_SYMLINK_NOFOLLOW)),
    "stat": ("p", os.stat),
    "lstat": ("p", os.lstat),
    "readlink": ("p", os.readlink),
    "access": ("pi", lambda path, wanted: os.access(path, wanted, effective_ids=True)),
    "list": ("p", lambda path: sorted(os.listdir(path))),
    "ls": ("p", _ls),
    "read": ("p", _read),
    "write": ("ps", _write),
    "append": ("ps", lambda path, data: _write(path, data, os.O_APPEND)),
    "setxattr": ("pss", lambda path, name, value: os.setxattr(path, name, value.encode())),
    "getxattr": ("ps", os.getxattr),
    "umask": ("m", os.umask),
    # of a handle that stays open until the script ends
    "hold": ("spfm", lambda _handle, path, flags, mode=0o777: os.open(path, flags, mode)),
    "release": ("h", os.close),
    "fstat": ("h", os.fstat),
    "pread": ("hii", os.pread),
    "pwrite": ("his", lambda handle, offset, data: os.pwrite(handle, data.encode(), offset)),
    "ftruncate": ("hi", os.ftruncate),
    "fallocate": ("hii", os.posix_fallocate),
    "fchmod": ("hm", os.fchmod),
    "fchown": ("huu", os.fchown),
    "futimens": ("hss", lambda handle, *times: _check(_libc.futimens(handle, _timespecs(*times)))),
    "seek": ("hii", os.lseek),
    "flist": ("h", lambda handle: sorted(os.listdir(handle))),
    "copy": ("hhi", os.copy_file_range),
    "fsync": ("h", os.fsync),
}
