"""Dimensions of the tables: kinds of files, users, path operations."""

from __future__ import annotations

FILES = ("regular", "dir", "fifo", "socket", "symlink")
DEVICES = ("block", "char")
ALL = FILES + DEVICES

USERS = ("ann", "kim", "eve", "bob", "root")
"""A user of each class towards files of ann and her group. The group has a member by primary and one by supplementary
group.
"""
CLASS_SHIFT = {"ann": 6, "kim": 3, "eve": 3, "bob": 0, "root": 0}
"""Where the bits of their class lie in a mode."""

NEEDS_EXISTING = {
    "chmod": "chmod {p} 0600",
    "chown": "chown {p} ann ann",
    "lchown": "lchown {p} ann ann",
    "link from": "link {p} n",
    "open": "open {p} O_RDONLY,O_NONBLOCK",
    "open for writing": "open {p} O_WRONLY,O_NONBLOCK",
    "rename from": "rename {p} n",
    "rmdir": "rmdir {p}",
    "truncate": "truncate {p} 10",
    "unlink": "unlink {p}",
    "utimens": "utimens {p} 1 2",
    "lutimens": "lutimens {p} 1 2",
    "stat": "stat {p}",
    "lstat": "lstat {p}",
    "readlink": "readlink {p}",
    "list": "list {p}",
    "setxattr": "setxattr {p} user.x y",
    "chmodat": "fchmodat . {p} 0600",
    "chownat": "fchownat . {p} ann ann",
    "unlinkat": "unlinkat . {p}",
    "rmdirat": "rmdirat . {p}",
    "utimensat": "utimensat . {p} 1 2",
    "statat": "fstatat . {p}",
    "readlinkat": "readlinkat . {p}",
    "linkat from": "linkat . {p} . n",
    "renameat from": "renameat . {p} . n",
}
"""Operations on a name `{p}` that has to be there."""

MAKES = {
    "create": "open {p} O_CREAT,O_WRONLY,O_EXCL 0644",
    "link to": "link f {p}",
    "mkdir": "mkdir {p} 0755",
    "mkfifo": "mkfifo {p} 0644",
    "mknod": "mknod {p} regular 0644",
    "symlink": "symlink test {p}",
    "createat": "openat . {p} O_CREAT,O_WRONLY,O_EXCL O_RDONLY 0644",
    "mkdirat": "mkdirat . {p} 0755",
    "mkfifoat": "mkfifoat . {p} 0644",
    "mknodat": "mknodat . {p} fifo 0644",
    "symlinkat": "symlinkat test . {p}",
    "linkat to": "linkat . f . {p}",
}
"""Operations that make a name `{p}`; a file `f` is there."""

REPLACES = {
    "rename to": "rename f {p}",
    "renameat to": "renameat . f . {p}",
    "open or create": "open {p} O_CREAT,O_RDWR",
}
"""Operations that make a name or take an existing one."""

EVERY_PATH_OPERATION = {**NEEDS_EXISTING, **MAKES, **REPLACES}


def on(operations: dict[str, str], path: str) -> tuple[str, ...]:
    """The operations' lines for one path."""
    return tuple(line.replace("{p}", path) for line in operations.values())
