"""The system calls of a LIP, as functions with the names that the Symphony paper uses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from libsym.arguments import Path, path_text
from libsym.channel.client import ClientChannel
from libsym.channel.process import process
from libsym.info import KvEntry, KvStat, ModelInfo
from libsym.kv import (
    KV,
    Flags,
    Locked,
    Range,
    close_script,
    create_script,
    extract_script,
    fork_script,
    lock_script,
    merge_script,
    open_script,
    read_script,
    reading_script,
    remove_script,
    stat_script,
    truncate_script,
    unlock_script,
)
from libsym.names import chmod_script, du_script, list_script, mkdir_script, rename_script
from libsym.open_file import channel_of
from libsym.status import daemon_check_script, daemon_stat_script, model_info_script


def connect(socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None) -> None:
    """Connects this process to the daemon at `socket` (else SYMPHONY_SOCKET, else the default place).

    Nobody needs to call it: the first system call does. It is for another socket, and for going on after the daemon was
    restarted: until then every call raises NotConnected, because the handles and anonymous files of before are gone.
    A live connection to the same daemon is kept.

    `domain`: a directory of the caller's own that has a quota (`user.kv.quota`). Then the connection is confined to
    it: paths begin there and can't leave it (CrossDevice), and anonymous files count to its quota. It stays confined as
    long as it lives, and so is the one that a child by fork() makes.

    >>> sym.connect()  # keeps the connection that there is
    """
    process.connect(None if socket is None else path_text(socket), None if domain is None else path_text(domain))


def close() -> None:
    """Ends the connection: files are closed, waiting calls get NotConnected, distributions stay readable.

    >>> kv = sym.kv_create("a.kv")
    >>> sym.close()
    >>> sym.kv_list()[0].name  # the next call connects again
    'a.kv'
    """
    process.close()


def model_info() -> ModelInfo:
    """The model that the daemon serves.

    >>> sym.model_info().vocab_size
    259
    """
    return process.channel().run(model_info_script())


def daemon_stat() -> dict[str, Any]:
    """The state of the daemon in numbers: what `symphony stat` shows.

    >>> sym.daemon_stat()["model"]
    'tiny'
    """
    return process.channel().run(daemon_stat_script())


def daemon_check() -> dict[str, int]:
    """Has the daemon count its pages: free + referenced = all, and every reference has its holder; the figures.

    For root and the daemon's own user. Books that do not balance are an error (EIO) that says where.

    >>> books = sym.daemon_check()
    >>> books["num_free_pages"] + books["num_referenced_pages"] == books["num_pages"]
    True
    """
    return process.channel().run(daemon_check_script())


def kv_create(path: Path | None = None, mode: int = 0o600) -> KV:
    """A new, empty KV file, open for writing. Without a path it is anonymous: gone with its last handle.

    >>> with sym.kv_create("a.kv") as kv:
    ...     sym.kv_write(kv, [1, 2, 3])
    3
    """
    channel = process.channel()
    return channel.run(create_script(channel, path, mode))


def kv_open(path: Path, flags: Flags = "r") -> KV:
    """Opens a KV file. A relative path begins at the root of the mount, an absolute one must lie under it.

    "r": to read, stat and fork it; a fork is the caller's own and can be appended to, so a shared prefix needs no more.
    "rw": also to append (`pred`, `kv_write`) and to truncate; this takes write permission.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_open("a.kv").writable, sym.kv_open("a.kv", "rw").writable
    (False, True)
    """
    channel = process.channel()
    return channel.run(open_script(channel, path, flags))


def kv_close(kv: KV) -> None:
    """Closes a file; a second time does nothing. Files also close when the object, or the process, is gone.

    Generations that this handle started are cancelled; other calls of it end first.

    >>> kv = sym.kv_create()
    >>> sym.kv_close(kv)
    >>> kv.closed
    True
    """
    channel_of(kv, "kv_close").run(close_script(kv))


def kv_fork(kv: KV | Path, path: Path | None = None, *, mode: int = 0o600) -> KV:
    """A copy-on-write copy in constant time, open for writing; also of a file that another thread appends to.

    Of an open file, or by its path.

    >>> base = sym.kv_create()
    >>> length = sym.kv_write(base, [1, 2, 3])
    >>> fork = sym.kv_fork(base)
    >>> sym.kv_write(fork, [4]), base.len()
    (4, 3)
    """
    channel = _channel(kv)
    return channel.run(reading_script(channel, kv, lambda file: fork_script(file, path, mode=mode)))


def kv_extract(
    kv: KV | Path, ranges: Iterable[Range], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> KV:
    """A new file of some entries of `kv`, open for writing; without a path it is anonymous.

    `ranges`: (start, stop) pairs or slices, in any order; one may come again. None is the beginning or the end,
    negative numbers count from the end. What lies outside of the file is Invalid: nothing is clamped.

    `rebase`: the entries get positions from 0 on, their keys turned accordingly; False: they keep the positions they
    had. Either way an entry stays what it was computed as, after everything that was before it: what is left out has
    left its traces, and what now comes before was not seen. Pages that need no change are shared, not copied.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [10, 11, 12, 13])
    >>> sym.kv_read(sym.kv_extract(kv, [(0, 1), (-1, None)]))
    ([10, 13], [0, 1])
    """
    channel = _channel(kv)
    return channel.run(
        reading_script(channel, kv, lambda file: extract_script(file, ranges, path, rebase=rebase, mode=mode))
    )


def kv_merge(kvs: Iterable[KV | Path], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600) -> KV:
    """A new file of all entries of these files, one after the other (at most 256 files); the rest as `kv_extract`.

    Files that were computed apart have not seen each other: merging costs some accuracy against computing them as one
    text, and saves the computing.

    >>> a, b = sym.kv_create(), sym.kv_create()
    >>> lengths = sym.kv_write(a, [1, 2]), sym.kv_write(b, [3])
    >>> sym.kv_read(sym.kv_merge([a, b]))
    ([1, 2, 3], [0, 1, 2])
    """
    channel = process.channel()
    return channel.run(merge_script(channel, kvs, path, rebase=rebase, mode=mode))


def kv_lock(kv: KV, *, shared: bool = False, blocking: bool = True) -> Locked:
    """Takes the lock of a file, as flock(2): exclusive, or `shared` with others that share it.

    It waits until the lock is free, or with `blocking=False` fails with WouldBlock. The lock is advisory and belongs to
    this handle: it excludes other handles, other programs, and flock(1) on the mount. Taken again it is converted.
    `kv_unlock`, closing the file, or the end of `with sym.kv_lock(kv):` gives it back.

    >>> kv = sym.kv_create("a.kv")
    >>> with sym.kv_lock(kv):
    ...     try:
    ...         sym.kv_lock(sym.kv_open("a.kv"), blocking=False)
    ...     except sym.WouldBlock:
    ...         print("locked")
    locked
    """
    return channel_of(kv, "kv_lock").run(lock_script(kv, shared=shared, blocking=blocking))


def kv_unlock(kv: KV) -> None:
    """Gives the lock of a file back; nothing happens if this handle has none.

    >>> kv = sym.kv_create()
    >>> lock = sym.kv_lock(kv)
    >>> sym.kv_unlock(kv)
    """
    channel_of(kv, "kv_unlock").run(unlock_script(kv))


def kv_remove(kv: KV | Path) -> None:
    """Removes a file by its path; or an open file's name (`kv.path`), and closes that file.

    NotFound, and the file stays open, where others have moved it or removed the name since.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_remove("a.kv")
    >>> sym.kv_list()
    []
    """
    _channel(kv).run(remove_script(kv))


def kv_read(kv: KV | Path, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
    """The tokens and the positions of all entries, or of those from `start` to `stop`, as a slice has them.

    Of an open file, or by its path.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [7, 8, 9])
    >>> sym.kv_read(kv, 1)
    ([8, 9], [1, 2])
    """
    channel = _channel(kv)
    return channel.run(reading_script(channel, kv, lambda file: read_script(file, start, stop)))


def kv_truncate(kv: KV, num_tokens: int) -> None:
    """Cuts the file to its first `num_tokens` entries: rollback. Forks keep what they have.

    Generations that this handle started are cancelled; other calls on the file that came before end first.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [7, 8, 9])
    >>> sym.kv_truncate(kv, 1)
    >>> kv.len()
    1
    """
    channel_of(kv, "kv_truncate").run(truncate_script(kv, num_tokens))


def kv_stat(kv: KV | Path) -> KvStat:
    """What is known of a file: its kind, length, owner, pages and times; and what only its readers are told.

    Like stat(2) it needs no permission on the file itself; without the one to read it, what getfattr(1) would refuse is
    None: `exclusive_pages` and the advice.

    >>> kv = sym.kv_create("a.kv")
    >>> length = sym.kv_write(kv, [1, 2, 3])
    >>> sym.kv_stat("a.kv").tokens
    3
    """
    return _channel(kv).run(stat_script(kv))


def kv_list(path: Path = ".") -> list[KvEntry]:
    """The names in a directory of the mount, sorted; without a path in its root.

    >>> sym.kv_create("b.kv").close()
    >>> sym.kv_create("a.kv").close()
    >>> [entry.name for entry in sym.kv_list()]
    ['a.kv', 'b.kv']
    """
    return process.channel().run(list_script(path))


def kv_mkdir(path: Path, mode: int = 0o700, *, parents: bool = False) -> None:
    """Makes a directory. With `parents` also those on the way, of the same mode, and one that is there is fine.

    >>> sym.kv_mkdir("docs/2026", parents=True)
    >>> sym.kv_mkdir("docs/2026", parents=True)
    >>> [(entry.name, entry.kind) for entry in sym.kv_list("docs")]
    [('2026', 'dir')]
    """
    process.channel().run(mkdir_script(path, mode, parents=parents))


def kv_rename(old: Path, new: Path) -> None:
    """Moves a name, over an existing one if there is one, as rename(2).

    The `path` of a KV that this program has open by the name follows. What others move, or a directory on the way, does
    not show there.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_rename("a.kv", "b.kv")
    >>> [entry.name for entry in sym.kv_list()]
    ['b.kv']
    """
    channel = process.channel()
    channel.run(rename_script(channel, old, new))


def kv_chmod(path: Path, mode: int) -> None:
    """Changes the permission bits of a file.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_chmod("a.kv", 0o644)
    >>> oct(sym.kv_stat("a.kv").mode)
    '0o644'
    """
    process.channel().run(chmod_script(path, mode))


def kv_du(path: Path = ".") -> dict[str, Any]:
    """What the files below a path cost: `rows` and their `total`, in tokens, pages, exclusive and shared pages.

    Plain files have `plain_bytes` instead. `exclusive_pages` and `shared_pages` are None of files that may not be read;
    in the total they are of those that may be. In it each page counts once, however many files share it. `denied` names
    the directories that were not looked into: they may not be read, or their paths are too long to be used. What others
    change meanwhile may or may not show.

    >>> with sym.kv_create("base.kv") as base:
    ...     length = sym.kv_write(base, [1] * 64)
    ...     sym.kv_fork(base, "fork.kv").close()
    >>> [(row["path"], row["pages"], row["exclusive_pages"]) for row in sym.kv_du()["rows"]]
    [('./base.kv', 2, 0), ('./fork.kv', 2, 0)]
    >>> sym.kv_du()["total"]["pages"]
    2
    >>> sym.kv_remove("base.kv")
    >>> sym.kv_remove("fork.kv")
    """
    return process.channel().run(du_script(path))


def _channel(kv: KV | Path) -> ClientChannel:
    """For an open file its own connection; for a path this process's."""
    return kv.channel if isinstance(kv, KV) else process.channel()
