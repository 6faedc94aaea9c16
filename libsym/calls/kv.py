"""KV files as Python objects, and the calls on them."""

from __future__ import annotations

import json
import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from os import PathLike
from typing import Literal, Self, TypeVar

from libsym.abi import FORK_ENDED, LOCK_NOWAIT, LOCK_SHARED, MAX_FORKS, OPEN_WRITE, RANGE_END, REBASE, Op
from libsym.arguments import Path, int32, int64, model_name, path_bytes, path_text, permissions, shown
from libsym.calls.faces import file_call, script_of, system_call
from libsym.calls.info import KvStat
from libsym.calls.open_file import OpenFile, exchange, length_script
from libsym.calls.pred import kv_write
from libsym.calls.pred import pred as pred_call
from libsym.calls.status import model_info
from libsym.channel.process import process
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import BadHandle, Exists, Invalid, NotFound, SymError
from libsym.rows.notebook import fact_table

T = TypeVar("T")
Flags = Literal["r", "rw"]
OpenFlags = Literal["r", "rw", "a"]
Range = int | slice | range | Sequence[int | None]
"""Entries of a file: the index of one entry, a slice, or (start, stop). None is the beginning or the end. Negative
indexes count from the end.
"""
_SHOWN_TOKENS = 32
"""Number of tokens at the end of a file that a notebook shows."""


class KV(OpenFile):
    """An open KV file. Any number of threads and tasks may use it; appends take effect one after the other.

    The file is closed by `close()`, by the end of a `with` block, or by the next call after the object is gone. An
    anonymous file (`path` is None) is removed with its last handle. The methods block the thread; a task calls the
    functions of `sym.aio` instead.

    >>> with sym.kv_create("notes.kv") as kv:
    ...     kv.path, kv.len(), kv.writable, kv.closed
    ('notes.kv', 0, True, False)
    >>> kv
    <KV notes.kv, closed>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Show the path and the state, and on a live connection the length, which takes a call to the daemon."""
        name = self.path or "anonymous"
        if self.closed:
            return f"<KV {name}, closed>"
        mode = "open for writing" if self.writable else "open for reading"
        if self._channel.alive:
            with suppress(SymError):
                return f"<KV {name}, {self.len()} entries, {mode}>"
        return f"<KV {name}, of a connection that is over>"

    def _repr_html_(self) -> str | None:
        """Return the file's facts and the end of its text as HTML. None: the file is closed, or the daemon is gone."""
        if self.closed or not self._channel.alive:
            return None
        try:
            stat, (tokens, _) = self.stat(), self.read(-_SHOWN_TOKENS)
            texts = self._channel.run(vocabulary_script(self._channel))
        except SymError:
            return None
        text = b"".join(texts[token] for token in tokens if 0 <= token < len(texts)).decode(errors="replace")
        facts = [
            ("entries", f"{stat.tokens:,}"),
            ("ends in", repr(text)),
            ("pages", f"{stat.pages:,}"),
            ("in", stat.tier or "unknown"),
            ("open for", "writing" if self.writable else "reading"),
        ]
        return fact_table(f"KV {self.path or 'anonymous'}", facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Close the file without waiting, because a cancelled task cannot wait."""
        if handle := self.give_up():
            self._channel.close_soon(handle)

    def close(self) -> None:
        """Close the file and cancel the generations that this handle started. A second close has no effect.

        >>> kv = sym.kv_create()
        >>> kv.close()
        >>> kv
        <KV anonymous, closed>
        """
        self._channel.run(_close(self))

    def fork(self, path: Path | None = None, *, mode: int = 0o600, ended: bool = False) -> KV:
        """Make a copy-on-write copy of the file, open for writing, in constant time: see `libsym.kv_fork`.

        >>> base = sym.kv_create()
        >>> length = sym.kv_write(base, [1, 2, 3])
        >>> base.fork().read()
        ([1, 2, 3], [0, 1, 2])
        """
        return self._channel.run(_fork(self, path, mode, ended=ended))

    def fork_n(self, n: int, *, mode: int = 0o600, ended: bool = False) -> list[KV]:
        """Make `n` forks in one call: see `libsym.kv_fork_n`.

        >>> base = sym.kv_create()
        >>> length = sym.kv_write(base, [1, 2, 3])
        >>> len(base.fork_n(4))
        4
        """
        return self._channel.run(_fork_n(self, n, mode, ended=ended))

    def extract(
        self, ranges: Iterable[Range], path: Path | None = None, *, rebase: bool = True, mode: int = 0o600
    ) -> KV:
        """Make a new file from some of the entries: see `libsym.kv_extract`.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [10, 11, 12])
        >>> kv.extract([(0, 1), (2, 3)]).read()
        ([10, 12], [0, 1])
        """
        return self._channel.run(_extract(self, ranges, path, rebase, mode))

    def keep(self, ranges: Iterable[Range], rebase: bool = True) -> None:
        """Keep only the entries in `ranges`, in place: see `libsym.kv_keep`.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [10, 11, 12, 13])
        >>> kv.keep([0, (-2, None)])
        >>> kv.read()
        ([10, 12, 13], [0, 1, 2])
        """
        kv_keep(self, ranges, rebase)

    def lock(self, *, shared: bool = False, blocking: bool = True) -> Locked:
        """Lock the file, as flock(2) does: see `libsym.kv_lock`.

        >>> kv = sym.kv_create("shared.kv")
        >>> with kv.lock():
        ...     sym.kv_write(kv, [1])
        1
        """
        return kv_lock(self, shared=shared, blocking=blocking)

    def unlock(self) -> None:
        """Release the lock of this handle, if it has one. Closing the file releases the lock, too.

        >>> kv = sym.kv_create()
        >>> lock = kv.lock()
        >>> kv.unlock()
        """
        kv_unlock(self)

    def remove(self) -> None:
        """Remove the file's name (`path`), and close the file. Other handles and forks keep their entries.

        NotFound: another program has moved the file or removed its name. Then the file stays open.

        >>> kv = sym.kv_create("gone.kv")
        >>> kv.remove()
        >>> sym.kv_list()
        []
        """
        kv_remove(self)

    def truncate(self, num_tokens: int) -> None:
        """Cut the file to its first `num_tokens` entries, and cancel the generations that this handle started.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [1, 2, 3])
        >>> kv.truncate(1)
        >>> kv.len()
        1
        """
        kv_truncate(self, num_tokens)

    def stat(self) -> KvStat:
        """Return the facts of the file: see `libsym.kv_stat`.

        >>> sym.kv_create("a.kv", 0o640).stat().mode == 0o640
        True
        """
        return kv_stat(self)

    def len(self) -> int:
        """Return the number of entries in the file now.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [1, 2, 3])
        >>> kv.len(), len(kv)
        (3, 3)
        """
        return self._channel.run(length_script(self))

    def __len__(self) -> int:
        return self.len()

    def __bool__(self) -> bool:
        return True  # without this method, an empty file would be false

    def room(self) -> int:
        """Return the number of entries that can still be appended within the model's context.

        >>> kv = sym.kv_create()
        >>> room, length = kv.room(), sym.kv_write(kv, [7, 8, 9])
        >>> room == sym.model_info().max_positions, room - kv.room()
        (True, 3)
        """
        return self._channel.run(room_script(self))

    def read(self, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
        """Return the tokens and the positions of all entries, or of those from `start` to `stop`, as in a slice.

        The result is a snapshot of the file, even if other programs change the file during the call.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [7, 8, 9])
        >>> kv.read(-2)
        ([8, 9], [1, 2])
        """
        return self._channel.run(_read(self, start, stop))

    pred = pred_call
    write = kv_write


class Locked:
    """A lock that an open file's handle holds. The end of a `with` block, `unlock` or closing the file releases it."""

    __slots__ = ("kv",)

    def __init__(self, kv: KV) -> None:
        self.kv = kv

    def __enter__(self) -> KV:
        return self.kv

    def __exit__(self, *_exc: object) -> None:
        if not self.kv.closed:
            self.kv.unlock()

    async def __aenter__(self) -> KV:
        return self.kv

    async def __aexit__(self, *_exc: object) -> None:
        if not self.kv.closed:
            self.kv.is_locked = False
            self.kv.channel.unlock_soon(self.kv.handle)


@system_call
def kv_create(path: Path | None = None, mode: int = 0o600, *, model: str | None = None) -> Script[KV]:
    """Make an empty KV file, open for writing. Without a path the file is anonymous, and ends with its last handle.

    `model`: the name of the model that the file belongs to, for good. None: the model of the connection.

    >>> with sym.kv_create("a.kv") as kv:
    ...     sym.kv_write(kv, [1, 2, 3])
    3
    >>> sym.kv_create(model="large")
    Traceback (most recent call last):
      ...
    libsym.errors.Invalid: there is no model 'large' here: this daemon serves tiny
    """
    name, payload = _name(path)
    if model is not None:
        payload += b"\0" + model_name(model)
    reply = yield Call(Op.KV_CREATE, args=(permissions(mode), 0, 0, 0), payload=payload)
    return opened(reply, name, writable=True)


@system_call
def kv_open(path: Path, flags: OpenFlags = "r") -> Script[KV]:
    """Open a KV file. A relative path begins at the root of the mount; an absolute one must lie under the mount.

    "r": to read, stat and fork the file. For a shared prefix this is enough: the caller can append to its own fork.
    "rw": also to append (`pred`, `kv_write`) and to truncate. The caller needs write permission.
    "a": as "rw"; if the file is missing, create it, empty.

    RuntimeWarning: the file has lost entries, see `KvStat.lost_tokens`.

    >>> sym.kv_open("a.kv", "a").len()
    0
    >>> sym.kv_open("a.kv").writable, sym.kv_open("a.kv", "rw").writable
    (False, True)
    """
    if flags == "a":
        return (yield from _open_or_create(path))
    write = checked_flags(flags, ", 'a' as 'rw' where a file that is not there is created")
    name = path_text(path)
    reply = yield Call(Op.KV_OPEN, flags=write, payload=path_bytes(name))
    return opened(reply, name, writable=bool(write))


def _open_or_create(path: Path) -> Script[KV]:
    """Open a file for writing, or create it.

    Another program may create or remove the file between the call that opens and the call that creates. So both calls
    are tried a second time.
    """
    for _ in range(2):
        with suppress(NotFound):
            return (yield from script_of(kv_open)(path, "rw"))
        with suppress(Exists):
            return (yield from script_of(kv_create)(path))
    return (yield from script_of(kv_open)(path, "rw"))


@file_call
def kv_close(kv: KV) -> Script[None]:
    """Close a file. A second close has no effect. A file is also closed when its object, or the process, is gone.

    The call cancels the generations that this handle started, and waits for other calls on the handle to end.

    >>> kv = sym.kv_create()
    >>> sym.kv_close(kv)
    >>> kv.closed
    True
    """
    return _close(kv)


def _close(kv: KV) -> Script[None]:
    channel, handle = kv.channel, kv.give_up()
    if handle and channel.alive:  # otherwise the handle ended with the daemon, or belongs to the parent process
        try:
            yield Call(Op.KV_CLOSE, 0, handle)
        except SymError:
            raise
        except BaseException:  # Ctrl-C may have arrived before the request was sent; a second close has no effect
            channel.close_later(handle)
            raise


@system_call
def kv_fork(kv: KV | Path, path: Path | None = None, *, mode: int = 0o600, ended: bool = False) -> Script[KV]:
    """Make a copy-on-write copy of a file in constant time, open for writing.

    `kv`: an open file, or a path. Other threads may append to the file at the same time. `ended`: leave out a turn of
    the conversation whose answer is under way, so that the copy ends with the last finished turn.

    >>> base = sym.kv_create()
    >>> length = sym.kv_write(base, [1, 2, 3])
    >>> fork = sym.kv_fork(base)
    >>> sym.kv_write(fork, [4]), base.len()
    (4, 3)
    """
    if isinstance(kv, KV):
        return _fork(kv, path, mode, ended=ended)
    return _reading(kv, lambda file: _fork(file, path, mode, ended=ended))


@system_call
def kv_fork_n(kv: KV | Path, n: int, *, mode: int = 0o600, ended: bool = False) -> Script[list[KV]]:
    """Make `n` anonymous forks of a file, all or none. The call costs little more than one `kv_fork`.

    >>> base = sym.kv_create()
    >>> length = sym.kv_write(base, [1, 2, 3])
    >>> [fork.len() for fork in sym.kv_fork_n(base, 2)]
    [3, 3]
    """
    if isinstance(kv, KV):
        return _fork_n(kv, n, mode, ended=ended)
    return _reading(kv, lambda file: _fork_n(file, n, mode, ended=ended))


def _fork_n(kv: KV, n: int, mode: int, *, ended: bool) -> Script[list[KV]]:
    n = int64(n, "n")
    if n < 0:
        raise Invalid(f"kv_fork_n(n={shown(n)}): 0 or more")
    forks: list[KV] = []
    try:
        while len(forks) < n:
            count = min(n - len(forks), MAX_FORKS)
            reply = yield Call(Op.KV_FORK, FORK_ENDED if ended else 0, kv.handle, (permissions(mode), count, 0, 0))
            forks += [
                KV(reply.channel, reply.args[0] + number, None, writable=True, place=(reply.args[2] + number, 0))
                for number in range(count)
            ]
            reply.claim()
    except BaseException:
        for fork in forks:
            fork.channel.close_soon(fork.give_up())
        raise
    return forks


def _fork(kv: KV, path: Path | None, mode: int, *, ended: bool) -> Script[KV]:
    name, payload = _name(path)
    reply = yield Call(Op.KV_FORK, FORK_ENDED if ended else 0, kv.handle, (permissions(mode), 0, 0, 0), payload)
    return opened(reply, name, writable=True)


@system_call
def kv_extract(
    kv: KV | Path, ranges: Iterable[Range], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> Script[KV]:
    """Make a new file from some entries of `kv`, open for writing. Without a path the new file is anonymous.

    `kv`: an open file, or a path.
    `ranges`: (start, stop) pairs, slices or indexes of single entries, in any order, also repeated. None is the
    beginning or the end. Negative indexes count from the end. Invalid: a range lies outside the file.
    `rebase`: give the entries positions from 0 on, and rotate their keys accordingly. False: keep their positions.

    Entries are not computed again. An entry still depends on all entries that preceded it in `kv`, even on dropped
    ones, and does not depend on new neighbours. The two files share the pages that need no change.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [10, 11, 12, 13])
    >>> sym.kv_read(sym.kv_extract(kv, [0, (2, None)]))
    ([10, 12, 13], [0, 1, 2])
    """
    return (yield from _reading(kv, lambda file: _extract(file, ranges, path, rebase, mode)))


def _extract(kv: KV, ranges: Iterable[Range], path: Path | None, rebase: bool, mode: int) -> Script[KV]:
    if not isinstance(ranges, Iterable):
        raise Invalid(f"ranges={shown(ranges)}: give a list of (start, stop) pairs, of slices, or of entries")
    if isinstance(ranges, tuple) and len(ranges) == 2 and all(isinstance(each, Integral) for each in ranges):
        raise Invalid(f"{ranges} may be a range, or two entries: give [{ranges}], or {list(ranges)}")
    name, payload = _name(path)
    pairs = array("q")
    for start, stop in map(_range_ends, ranges):
        if pairs and start > 0 and start == pairs[-1]:
            pairs[-1] = stop  # adjacent ranges become one, so that a list of single entries makes a short message
        else:
            pairs.extend((start, stop))
    reply = yield Call(
        Op.KV_EXTRACT,
        flags=REBASE if rebase else 0,
        handle=kv.handle,
        args=(permissions(mode), len(pairs) // 2, 0, 0),
        payload=pairs.tobytes() + payload,
    )
    return opened(reply, name, writable=True)


@file_call
def kv_keep(kv: KV, ranges: Iterable[Range], rebase: bool = True) -> Script[None]:
    """Keep only the entries in `ranges` of an anonymous file, in place: for a cache that evicts entries.

    The result is the same as after `kv = kv_extract(kv, ranges, rebase=rebase)`, but a Chat or a loop can continue with
    the same object. Forks keep their entries. The call cancels the generations that this handle started. Invalid: the
    file has a name, so other programs may have it open. Use an anonymous fork of such a file.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [10, 11, 12, 13])
    >>> sym.kv_keep(kv, [0, (-2, None)], rebase=False)
    >>> kv.read()
    ([10, 12, 13], [0, 2, 3])
    """
    if kv.path is not None:
        raise Invalid(f"{kv.path} has a name, and others may have it open: keep entries of a fork, or extract() them")
    rest = yield from _extract(kv, ranges, None, rebase, 0o600)
    exchange(kv, rest)
    yield from script_of(kv_close)(rest)


@system_call
def kv_merge(
    kvs: Iterable[KV | Path], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> Script[KV]:
    """Make a new file of all entries of up to 256 files, one after the other.

    `kvs`: open files, or paths. The other arguments are the same as in `kv_extract`. Entries are not computed again, so
    entries of one file have not attended to entries of another file. The merged file is less accurate than a file that
    is computed from the whole text, and costs no computing.

    >>> a, b = sym.kv_create(), sym.kv_create()
    >>> lengths = sym.kv_write(a, [1, 2]), sym.kv_write(b, [3])
    >>> sym.kv_read(sym.kv_merge([a, b]))
    ([1, 2, 3], [0, 1, 2])
    """
    if not isinstance(kvs, Iterable) or isinstance(kvs, (str, bytes, PathLike, dict, set, frozenset)):
        raise Invalid(f"kv_merge() takes a list of open files or their paths, not {shown(kvs)}")
    handles, by_path = array("Q"), list[KV]()
    try:
        for kv in kvs:
            if isinstance(kv, KV):
                file = kv
            else:
                file = yield from script_of(kv_open)(kv, "r")
                by_path.append(file)
            if file.channel is not process.connected:
                raise BadHandle(f"{file!r} belongs to an earlier connection of this program, or another: open it again")
            handles.append(file.handle)
        name, payload = _name(path)
        reply = yield Call(
            Op.KV_MERGE,
            flags=REBASE if rebase else 0,
            args=(permissions(mode), len(handles), 0, 0),
            payload=handles.tobytes() + payload,
        )
        return opened(reply, name, writable=True)
    finally:
        for file in by_path:
            file.channel.close_soon(file.give_up())


@system_call
def kv_fetch(peer: str, path: Path, new_path: Path | None = None, *, mode: int = 0o600) -> Script[KV]:
    """Copy a KV file of another daemon, and open the copy for writing. Without `new_path` the copy is anonymous.

    `peer`: a name from the daemon's list of peers. `path`: the file on the peer's mount, which this program's user must
    be able to read there. The copy has the peer's entries, bit for bit, so nothing is computed again. Only pages that
    the user does not have here yet cross the network.

    >>> sym.kv_fetch("east", "handbook.kv")
    Traceback (most recent call last):
      ...
    libsym.errors.NotFound: handbook.kv of east: this daemon has no peers; see `peers` in symphony.toml(5)
    """
    if not isinstance(peer, str):
        raise Invalid(f"peer={shown(peer)}: give the name of a peer")
    name, _ = _name(new_path)
    names = json.dumps((peer, path_text(path), name)).encode()
    reply = yield Call(Op.KV_FETCH, args=(permissions(mode), 0, 0, 0), payload=names)
    return opened(reply, name, writable=True)


def _reading(kv: KV | Path, read: Callable[[KV], Script[T]]) -> Script[T]:
    """Run a script that only reads a file. If `kv` is a path, open the file for the script, and close it again."""
    if isinstance(kv, KV):
        return (yield from read(kv))
    opened = yield from script_of(kv_open)(kv, "r")
    try:
        return (yield from read(opened))
    finally:
        opened.channel.close_soon(opened.give_up())


@file_call
def kv_lock(kv: KV, *, shared: bool = False, blocking: bool = True) -> Script[Locked]:
    """Lock a file, as flock(2) does: exclusively, or `shared` with other holders.

    The call waits until the lock is free. With `blocking=False` it raises WouldBlock instead. The message names the
    process and program that hold the lock, if this program may see them. The lock is advisory and belongs to this
    handle: it excludes other handles, other programs, and flock(1) on the mount. A second `kv_lock` on the same handle
    converts the lock. `kv_unlock`, closing the file, or the end of `with sym.kv_lock(kv):` releases it.

    >>> kv = sym.kv_create("a.kv")
    >>> with sym.kv_lock(kv):
    ...     try:
    ...         sym.kv_lock(sym.kv_open("a.kv"), blocking=False)
    ...     except sym.WouldBlock:
    ...         print("locked")
    locked
    """
    # If Ctrl-C or a cancellation ends the wait, the channel unlocks, so that the handle does not get the lock later. A
    # conversion releases the old lock first.
    kv.is_locked = False
    yield Call(Op.KV_LOCK, flags=(LOCK_SHARED if shared else 0) | (0 if blocking else LOCK_NOWAIT), handle=kv.handle)
    kv.is_locked = True
    return Locked(kv)


@file_call
def kv_unlock(kv: KV) -> Script[None]:
    """Release the lock that this handle has on a file, if it has one.

    >>> kv = sym.kv_create()
    >>> lock = sym.kv_lock(kv)
    >>> sym.kv_unlock(kv)
    """
    kv.is_locked = False
    yield Call(Op.KV_UNLOCK, handle=kv.handle)


@system_call
def kv_remove(kv: KV | Path) -> Script[None]:
    """Remove a file, by a path or by an open KV.

    For an open file, the call removes the name (`kv.path`) and closes the file. NotFound: another program has moved the
    file, removed its name or replaced its content. Then the file stays open.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_remove("a.kv")
    >>> sym.kv_list()
    []
    """
    if not isinstance(kv, KV):
        yield Call(Op.KV_REMOVE, payload=path_bytes(kv))
        return
    if kv.path is not None:
        yield Call(Op.KV_REMOVE, handle=kv.handle, payload=path_bytes(kv.path))
    yield from script_of(kv_close)(kv)


@file_call
def kv_truncate(kv: KV, num_tokens: int) -> Script[None]:
    """Cut the file to its first `num_tokens` entries, as a rollback. Forks keep their entries.

    The call cancels the generations that this handle started, and waits for earlier calls on the file to end.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [7, 8, 9])
    >>> sym.kv_truncate(kv, 1)
    >>> kv.len()
    1
    """
    num_tokens = int64(num_tokens, "num_tokens")
    if num_tokens < 0:
        raise Invalid(f"cannot cut {kv.name} to {num_tokens} entries: 0 is the least")
    kv.num_cuts += 1
    yield Call(Op.KV_TRUNCATE, handle=kv.handle, args=(num_tokens, 0, 0, 0))


@file_call
def kv_rewind(kv: KV, tokens: Iterable[int]) -> Script[list[int]]:
    """Cut the file to the prefix that it shares with `tokens`; return the rest of `tokens`, to append next.

    So a fork of any file with a similar text serves as a cache: `sym.pred(kv, sym.kv_rewind(kv, tokens))` computes only
    the new part. At least the last token is returned, because `pred` needs a token. Positions are not compared.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, sym.tokenize("cat"))
    >>> sym.detokenize(sym.kv_rewind(kv, sym.tokenize("cap"))), kv.len()
    ('p', 2)
    """
    wanted = int32(tokens, "token").tolist()
    if not wanted:
        raise Invalid("kv_rewind() takes the tokens of a text, one at least")
    held, _ = yield from _read(kv, 0, None)
    pairs = zip(held, wanted[:-1], strict=False)
    num_kept = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(held), len(wanted) - 1))
    if num_kept < len(held):
        yield from script_of(kv_truncate)(kv, num_kept)
    return wanted[num_kept:]


@system_call
def kv_stat(kv: KV | Path) -> Script[KvStat]:
    """Return the facts of a file: kind, length, owner, pages, times and advice.

    `kv`: an open file, or a path. Like stat(2), the call needs no permission on the file itself. If the caller may not
    read the file, some facts are None: see `KvStat`.

    >>> kv = sym.kv_create("a.kv")
    >>> length = sym.kv_write(kv, [1, 2, 3])
    >>> sym.kv_stat("a.kv").tokens
    3
    """
    if isinstance(kv, KV):
        reply = yield Call(Op.KV_STAT, handle=kv.handle)
    else:
        reply = yield Call(Op.KV_STAT, payload=path_bytes(kv))
    return KvStat.from_json(reply.payload)


@system_call
def kv_read(kv: KV | Path, start: int = 0, stop: int | None = None) -> Script[tuple[list[int], list[int]]]:
    """Return the tokens and the positions of all entries, or of those from `start` to `stop`, as in a slice.

    `kv`: an open file, or a path.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [7, 8, 9])
    >>> sym.kv_read(kv, 1)
    ([8, 9], [1, 2])
    """
    return (yield from _reading(kv, lambda file: _read(file, start, stop)))


def _read(kv: KV, start: int, stop: int | None) -> Script[tuple[list[int], list[int]]]:
    start, stop = int64(start, "start"), None if stop is None else int64(stop, "stop")
    while True:
        found = yield from _read_once(kv, start, slice(start, stop))
        if found is not None:
            return found


def _read_once(kv: KV, start: int, wanted: slice) -> Script[tuple[list[int], list[int]] | None]:
    """Read entries in one or more messages. None: the file was cut between two messages."""
    count = max(1, wanted.stop - start) if start >= 0 and wanted.stop is not None and wanted.stop >= 0 else 0
    reply = yield Call(Op.KV_READ, handle=kv.handle, args=(start if start >= 0 else RANGE_END, count, 0, 0))
    _, length, cuts, _ = reply.args
    first, stop, _ = wanted.indices(length)
    tokens, positions = array("i"), array("i")
    if start >= 0:
        _take_entries(reply, max(stop - first, 0), tokens, positions)
    while first + len(tokens) < stop:
        at = first + len(tokens)
        reply = yield Call(Op.KV_READ, handle=kv.handle, args=(at, stop - at, 0, 0))
        if reply.args[2] != cuts:
            return None
        _take_entries(reply, stop - at, tokens, positions)
    return tokens.tolist(), positions.tolist()


def room_script(kv: KV) -> Script[int]:
    """Return the number of entries that can still be appended: see `KV.room`."""
    info = yield from script_of(model_info)()
    _, positions = yield from _read(kv, -1, None)
    return info.max_positions - 1 - positions[0] if positions else info.max_positions


def checked_flags(flags: Flags, others: str = "") -> int:
    """Return the flags of a request that opens a file. `others`: further values, for the message."""
    if flags not in ("r", "rw"):
        raise Invalid(f"flags={shown(flags)}: 'r' to read and fork, 'rw' to append and cut as well{others}")
    return OPEN_WRITE if flags == "rw" else 0


def opened(reply: Reply, name: str | None, *, writable: bool) -> KV:
    kv = KV(reply.channel, reply.args[0], name, writable=writable, place=(reply.args[2], reply.args[3]))
    reply.claim()  # after the KV exists, because from here on the KV closes the handle; a second close has no effect
    if lost := int.from_bytes(reply.payload, "little"):
        _warn_of_lost(f"{name}: {reply.args[1]} of its {reply.args[1] + lost} entries are left")
    return kv


def _warn_of_lost(what: str) -> None:
    """Warn at the program's line that opened the file. The stack frames of libsym are skipped."""
    frame, level = sys._getframe(), 1  # noqa: SLF001 - warnings count frames, too
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "libsym":  # exec() may leave it out
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{what}: see symphony help user.kv.lost", RuntimeWarning, stacklevel=level)


def _name(path: Path | None) -> tuple[str | None, bytes]:
    """Return the path of a new file twice: as text, and as bytes for the request. None: the file is anonymous."""
    if path is None:
        return None, b""
    name = path_text(path)
    return name, path_bytes(name)


def _range_ends(wanted: Range) -> tuple[int, int]:
    """Return both ends of a range for the request. The daemon resolves negative ends."""
    if isinstance(wanted, (int, Integral)):
        entry = int64(wanted, "an entry")
        return entry, RANGE_END if entry == -1 else entry + 1
    if isinstance(wanted, (slice, range)):
        if wanted.step not in (None, 1):
            raise Invalid(f"{wanted} skips entries: give a range for each piece")
        start, stop = wanted.start, wanted.stop
    else:
        try:
            start, stop = wanted
        except (TypeError, ValueError):
            raise Invalid(f"{shown(wanted)} is no range: give (start, stop) pairs, slices, or entries") from None
    return 0 if start is None else int64(start, "start"), RANGE_END if stop is None else int64(stop, "stop")


def _take_entries(reply: Reply, most: int, tokens: array[int], positions: array[int]) -> None:
    numbers, count = array("i", reply.payload), reply.args[0]
    tokens += numbers[: min(count, most)]
    positions += numbers[count : count + min(count, most)]
