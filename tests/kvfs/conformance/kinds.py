"""Dimensions of the tables: kinds of files, users, path operations.

The kernel walks paths for the calls relative to a directory as it does for the others: the mount sees no difference.
"""

from collections.abc import Iterable

FILES = ("regular", "dir", "fifo", "socket", "symlink")
DEVICES = ("block", "char")
ALL = FILES + DEVICES

USERS = ("ann", "kim", "eve", "bob", "root")
"""A user of each class towards files of ann and her group. The group has a member by primary and one by supplementary
group.
"""
CLASS_SHIFT = {"ann": 6, "kim": 3, "eve": 3, "bob": 0, "root": 0}
"""Where the bits of their class lie in a mode."""

NEEDS_EXISTING = """
    chmod {p} 0600; chown {p} ann ann; lchown {p} ann ann; link {p} n; open {p} O_RDONLY,O_NONBLOCK;
    open {p} O_WRONLY,O_NONBLOCK; rename {p} n; rmdir {p}; truncate {p} 10; unlink {p}; utimens {p} 1 2;
    lutimens {p} 1 2; stat {p}; lstat {p}; readlink {p}; list {p}; setxattr {p} user.x y
"""
"""Operations on a name `{p}` that has to be there."""

MAKES = """
    open {p} O_CREAT,O_WRONLY,O_EXCL 0644; link f {p}; mkdir {p} 0755; mkfifo {p} 0644; mknod {p} regular 0644;
    symlink test {p}
"""
"""Operations that make a name `{p}`; a file `f` is there."""

EVERY_PATH_OPERATION = f"{NEEDS_EXISTING};{MAKES}; rename f {{p}}; open {{p}} O_CREAT,O_RDWR"


def on(operations: str, path: str) -> list[str]:
    """The operations' lines for one path."""
    return [line.strip().replace("{p}", path) for line in operations.split(";")]


def modes_of(user: str, digits: Iterable[int] = range(8)) -> tuple[str, ...]:
    """Modes that give the user's class each of the digits, and the other classes the opposite."""
    shift = CLASS_SHIFT[user]
    others = 0o777 & ~(7 << shift)
    return tuple(f"{digit << shift | (digit ^ 7) * 0o111 & others:04o}" for digit in digits)
