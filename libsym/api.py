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
from libsym.kv import KV, Flags, Path, Rows, create, open_file, path_bytes, path_text


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


def kv_remove(kv: KV | Path) -> None:
    """Removes a file by its path; or the name that an open file was opened by, and closes that file."""
    if isinstance(kv, KV):
        kv.remove()
    else:
        process.channel().call(Op.KV_REMOVE, payload=path_bytes(path_text(kv)))


def kv_write(kv: KV, tokens: Iterable[int], positions: int | Sequence[int] | None = None) -> int:
    """Appends tokens as `pred` does, without asking for a distribution; gives the new length."""
    return kv.write(tokens, positions)


def kv_read(kv: KV) -> tuple[list[int], list[int]]:
    """The tokens and the positions of all entries."""
    return kv.read()


def kv_truncate(kv: KV, num_tokens: int) -> None:
    """Cuts the file to its first `num_tokens` entries: rollback. Forks keep what they have."""
    kv.truncate(num_tokens)


def kv_stat(kv: KV | Path) -> KvStat:
    """What is known of a file: its kind, length, owner, pages and times."""
    if isinstance(kv, KV):
        return kv.stat()
    return KvStat.from_json(process.channel().call(Op.KV_STAT, payload=path_bytes(path_text(kv))).payload)


def kv_list(path: Path = ".") -> list[KvEntry]:
    """The names in a directory of the mount; without a path in its root."""
    entries = parse(process.channel().call(Op.KV_LIST, payload=path_bytes(path_text(path))).payload)
    return [KvEntry(**split_object(KvEntry, entry)[0]) for entry in entries]


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
