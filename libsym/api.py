"""The system calls of a LIP, as functions with the names that the Symphony paper uses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from libsym.abi import Op
from libsym.client import process
from libsym.dist import Dist
from libsym.errors import Invalid
from libsym.info import KvEntry, KvStat, ModelInfo, parse, split_object
from libsym.kv import KV, Flags, Locked, Path, Range, Rows, create, merge, open_file, path_bytes, path_text


def connect(socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None) -> None:
    """Connects this process to the daemon at `socket` (else SYMPHONY_SOCKET, else the default place).

    Nobody needs to call it: the first system call does. It is for another socket, and for going on after the daemon was
    restarted: until then every call raises NotConnected, because the handles and anonymous files of before are gone.
    A live connection to the same daemon is kept.

    `domain`: a directory of the caller's own that has a quota (`user.kv.quota`). Then the connection is confined to
    it: paths begin there and can't leave it (CrossDevice), and anonymous files count to its quota. It stays confined as
    long as it lives, and so is the one that a child by fork() makes.
    """
    process.connect(None if socket is None else path_text(socket), None if domain is None else path_text(domain))


def close() -> None:
    """Ends the connection: files are closed, waiting calls get NotConnected, distributions stay readable."""
    process.close()


def model_info() -> ModelInfo:
    """The model that the daemon serves."""
    return ModelInfo.from_json(process.channel().call(Op.MODEL_INFO).payload)


def daemon_stat() -> dict[str, Any]:
    """The state of the daemon in numbers: what `symphony stat` shows."""
    return _object(process.channel().call(Op.STAT).payload)


def daemon_check() -> dict[str, int]:
    """Has the daemon count its pages: free + referenced = all, and every reference has its holder; the figures.

    For root and the daemon's own user. Books that do not balance are an error (EIO) that says where.
    """
    return _object(process.channel().call(Op.CHECK).payload)


def pred(kv: KV, tokens: Iterable[int], positions: int | Sequence[int] | None = None, *, rows: Rows = "last") -> Dist:
    """Appends `tokens` to `kv`, runs the model, and gives the distribution of the token that follows.

    `positions`: one number for each token, or the first as a number and the others follow it; without them they
    continue after the last entry's. Causality is the order of the entries; positions only rotate. `rows="all"`: a
    distribution after every token, `dist[i]` after the i-th.
    """
    return kv.pred(tokens, positions, rows=rows)


def kv_create(path: Path | None = None, mode: int = 0o600) -> KV:
    """A new, empty KV file, open for writing. Without a path it is anonymous: gone with its last handle."""
    return create(process.channel(), path, mode)


def kv_open(path: Path, flags: Flags = "r") -> KV:
    """Opens a KV file. A relative path begins at the root of the mount, an absolute one must lie under it.

    "r": to read, stat and fork it; a fork is the caller's own and can be appended to, so a shared prefix needs no more.
    "rw": also to append (`pred`, `kv_write`) and to truncate; this takes write permission.
    """
    return open_file(process.channel(), path, flags)


def kv_close(kv: KV) -> None:
    """Closes a file; a second time does nothing. Files also close when the object, or the process, is gone."""
    kv.close()


def kv_fork(kv: KV, path: Path | None = None, *, mode: int = 0o600) -> KV:
    """A copy-on-write copy in constant time, open for writing; also of a file that another thread appends to."""
    return kv.fork(path, mode=mode)


def kv_extract(
    kv: KV, ranges: Iterable[Range], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> KV:
    """A new file of some entries of `kv`, open for writing; without a path it is anonymous.

    `ranges`: (start, stop) pairs or slices, in any order; one may come again. None is the beginning or the end,
    negative numbers count from the end. What lies outside of the file is Invalid: nothing is clamped.

    `rebase`: the entries get positions from 0 on, their keys turned accordingly; False: they keep the positions they
    had. Either way an entry stays what it was computed as, after everything that was before it: what is left out has
    left its traces, and what now comes before was not seen. Pages that need no change are shared, not copied.
    """
    return kv.extract(ranges, path, rebase=rebase, mode=mode)


def kv_merge(kvs: Iterable[KV], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600) -> KV:
    """A new file of all entries of these files, one after the other (at most 256 files); the rest as `kv_extract`.

    Files that were computed apart have not seen each other: merging costs some accuracy against computing them as one
    text, and saves the computing.
    """
    return merge(process.channel(), kvs, path, rebase=rebase, mode=mode)


def kv_lock(kv: KV, *, shared: bool = False, blocking: bool = True) -> Locked:
    """Takes the lock of a file, as flock(2): exclusive, or `shared` with others that share it.

    It waits until the lock is free, or with `blocking=False` fails with WouldBlock. The lock is advisory and belongs to
    this handle: it excludes other handles, other programs, and flock(1) on the mount. Taken again it is converted.
    `kv_unlock`, closing the file, or the end of `with sym.kv_lock(kv):` gives it back.
    """
    return kv.lock(shared=shared, blocking=blocking)


def kv_unlock(kv: KV) -> None:
    """Gives the lock of a file back; nothing happens if this handle has none."""
    kv.unlock()


def kv_remove(kv: KV | Path) -> None:
    """Removes a file by its path; or the name that an open file was opened by, and closes that file."""
    if isinstance(kv, KV):
        kv.remove()
    else:
        process.channel().call(Op.KV_REMOVE, payload=path_bytes(path_text(kv)))


def kv_write(kv: KV, tokens: Iterable[int], positions: int | Sequence[int] | None = None) -> int:
    """Appends tokens as `pred` does, without asking for a distribution; gives the new length."""
    return kv.write(tokens, positions)


def kv_read(kv: KV, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
    """The tokens and the positions of all entries, or of those from `start` to `stop`, as a slice has them."""
    return kv.read(start, stop)


def kv_truncate(kv: KV, num_tokens: int) -> None:
    """Cuts the file to its first `num_tokens` entries: rollback. Forks keep what they have."""
    kv.truncate(num_tokens)


def kv_stat(kv: KV | Path) -> KvStat:
    """What is known of a file: its kind, length, owner, pages and times."""
    if isinstance(kv, KV):
        return kv.stat()
    return KvStat.from_json(process.channel().call(Op.KV_STAT, payload=path_bytes(path_text(kv))).payload)


def kv_list(path: Path = ".") -> list[KvEntry]:
    """The names in a directory of the mount, sorted; without a path in its root."""
    wanted, found, more = path_bytes(path_text(path)), list[KvEntry](), 1
    while more:
        behind = b"\0" + path_bytes(found[-1].name) if found else b""
        reply = process.channel().call(Op.KV_LIST, payload=wanted + behind)
        found += [KvEntry(**split_object(KvEntry, entry)[0]) for entry in parse(reply.payload)]
        more = reply.args[0]
    return found


def kv_rename(old: Path, new: Path) -> None:
    """Moves a name, over an existing one if there is one, as rename(2)."""
    process.channel().call(Op.KV_RENAME, payload=json.dumps([path_text(old), path_text(new)]).encode())


def kv_chmod(path: Path, mode: int) -> None:
    """Changes the permission bits of a file."""
    process.channel().call(Op.KV_CHMOD, args=(mode, 0, 0, 0), payload=path_bytes(path_text(path)))


def kv_du(path: Path = ".") -> dict[str, Any]:
    """What the KV files below a path cost: `rows` and their `total`, in tokens, pages, exclusive and shared pages."""
    return _object(process.channel().call(Op.KV_DU, payload=path_bytes(path_text(path))).payload)


def send_to_user(x: Any) -> None:
    """Sends text to whoever launched this program: to standard output, at once.

    Text and bytes go as they are; anything else as a line of JSON.
    """
    if isinstance(x, (bytes, bytearray, memoryview)):
        sys.stdout.flush()
        sys.stdout.buffer.write(x)
    elif isinstance(x, str):
        sys.stdout.write(x)
    else:
        try:
            line = json.dumps(x, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid(f"send_to_user() takes text, bytes, or what JSON can say: {error}") from error
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _object(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = parse(text)
    return found
