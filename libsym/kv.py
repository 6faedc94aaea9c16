"""KV files as Python objects, and the calls on them."""

from __future__ import annotations

import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from os import PathLike
from typing import Literal, Self, TypeVar

from libsym.abi import FORK_ENDED, LOCK_NOWAIT, LOCK_SHARED, OPEN_WRITE, RANGE_END, REBASE, Op
from libsym.arguments import Path, int32, int64, path_bytes, path_text, permissions, shown
from libsym.channel.process import process
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import BadHandle, Exists, Invalid, NotFound, SymError
from libsym.faces import file_call, script_of, system_call
from libsym.info import KvStat
from libsym.open_file import OpenFile, exchange, length_script
from libsym.pred import kv_write
from libsym.pred import pred as pred_call
from libsym.rows.notebook import fact_table
from libsym.status import model_info

T = TypeVar("T")
Flags = Literal["r", "rw"]
OpenFlags = Literal["r", "rw", "a"]
Range = int | slice | range | Sequence[int | None]
"""Entries: the number of one, a slice, or (start, stop). None is the beginning or the end, negative numbers count from
the end."""
_SHOWN_TOKENS = 32
"""Tokens at the end of a file that a notebook shows."""


class KV(OpenFile):
    """An open KV file. Any number of threads and tasks may use it; appends take effect one after the other.

    It is closed by `close()`, by the end of a `with` block, or with the next call after the object is gone. An
    anonymous file (`path` is None) is gone with its last handle. The methods wait with the thread; a task calls the
    functions of `sym.aio` instead.

    >>> with sym.kv_create("notes.kv") as kv:
    ...     kv.path, kv.len(), kv.writable, kv.closed
    ('notes.kv', 0, True, False)
    >>> kv
    <KV notes.kv, closed>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Asks the daemon for the length, if there is one to ask."""
        name = self.path or "anonymous"
        if self.closed:
            return f"<KV {name}, closed>"
        mode = "open for writing" if self.writable else "open for reading"
        if self._channel.alive:
            with suppress(SymError):
                return f"<KV {name}, {self.len()} entries, {mode}>"
        return f"<KV {name}, of a connection that is over>"

    def _repr_html_(self) -> str | None:
        """For a notebook: what the file is, and how its text ends. None, the plain repr, where nobody can say."""
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
        """Says that it is closed and waits for nothing: a task that is being cancelled could not."""
        if handle := self.give_up():
            self._channel.close_soon(handle)

    def close(self) -> None:
        """Closes the handle and cancels the generations that it started; a second time does nothing.

        >>> kv = sym.kv_create()
        >>> kv.close()
        >>> kv
        <KV anonymous, closed>
        """
        self._channel.run(_close(self))

    def fork(self, path: Path | None = None, *, mode: int = 0o600, ended: bool = False) -> KV:
        """A copy-on-write copy of what is in the file now, open for writing, in constant time: see `libsym.kv_fork`.

        >>> base = sym.kv_create()
        >>> length = sym.kv_write(base, [1, 2, 3])
        >>> base.fork().read()
        ([1, 2, 3], [0, 1, 2])
        """
        return self._channel.run(_fork(self, path, mode, ended=ended))

    def extract(
        self, ranges: Iterable[Range], path: Path | None = None, *, rebase: bool = True, mode: int = 0o600
    ) -> KV:
        """A new file of some of the entries: see `libsym.kv_extract`.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [10, 11, 12])
        >>> kv.extract([(0, 1), (2, 3)]).read()
        ([10, 12], [0, 1])
        """
        return self._channel.run(_extract(self, ranges, path, rebase, mode))

    def keep(self, ranges: Iterable[Range], rebase: bool = True) -> None:
        """Keeps these entries of the file and drops the others, in place: see `libsym.kv_keep`.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [10, 11, 12, 13])
        >>> kv.keep([0, (-2, None)])
        >>> kv.read()
        ([10, 12, 13], [0, 1, 2])
        """
        kv_keep(self, ranges, rebase)

    def lock(self, *, shared: bool = False, blocking: bool = True) -> Locked:
        """Takes the file's lock, as flock(2): see `libsym.kv_lock`.

        >>> kv = sym.kv_create("shared.kv")
        >>> with kv.lock():
        ...     sym.kv_write(kv, [1])
        1
        """
        return kv_lock(self, shared=shared, blocking=blocking)

    def unlock(self) -> None:
        """Gives the lock up; nothing happens if there is none. Closing the file does it, too.

        >>> kv = sym.kv_create()
        >>> lock = kv.lock()
        >>> kv.unlock()
        """
        kv_unlock(self)

    def remove(self) -> None:
        """Removes the file's name (`path`), and closes it. Other handles and forks keep what they have.

        NotFound, and nothing happens, where others have moved the file or removed the name since.

        >>> kv = sym.kv_create("gone.kv")
        >>> kv.remove()
        >>> sym.kv_list()
        []
        """
        kv_remove(self)

    def truncate(self, num_tokens: int) -> None:
        """Cuts the file to its first `num_tokens` entries; generations that this handle started are cancelled.

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
        """Entries in the file now.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [1, 2, 3])
        >>> kv.len(), len(kv)
        (3, 3)
        """
        return self._channel.run(length_script(self))

    def __len__(self) -> int:
        return self.len()

    def __bool__(self) -> bool:
        return True  # an empty file is a file

    def room(self) -> int:
        """Return the number of entries that the model's context has room for, behind the last one.

        >>> kv = sym.kv_create()
        >>> room, length = kv.room(), sym.kv_write(kv, [7, 8, 9])
        >>> room == sym.model_info().max_positions, room - kv.room()
        (True, 3)
        """
        return self._channel.run(room_script(self))

    def read(self, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
        """The tokens and the positions of all entries, or of those from `start` to `stop`, as a slice has them.

        What is read was in the file at one time, however long it is and whatever others do to it meanwhile.

        >>> kv = sym.kv_create()
        >>> length = sym.kv_write(kv, [7, 8, 9])
        >>> kv.read(-2)
        ([8, 9], [1, 2])
        """
        return self._channel.run(_read(self, start, stop))

    pred = pred_call
    write = kv_write


class Locked:
    """A lock that is held: a `with` block gives it back at its end. Without one, `unlock` or closing the file does."""

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
def kv_create(path: Path | None = None, mode: int = 0o600) -> Script[KV]:
    """A new, empty KV file, open for writing. Without a path it is anonymous: gone with its last handle.

    >>> with sym.kv_create("a.kv") as kv:
    ...     sym.kv_write(kv, [1, 2, 3])
    3
    """
    name, payload = _name(path)
    reply = yield Call(Op.KV_CREATE, args=(permissions(mode), 0, 0, 0), payload=payload)
    return opened(reply, name, writable=True)


@system_call
def kv_open(path: Path, flags: OpenFlags = "r") -> Script[KV]:
    """Opens a KV file. A relative path begins at the root of the mount, an absolute one must lie under it.

    "r": to read, stat and fork it; a fork is the caller's own and can be appended to, so a shared prefix needs no more.
    "rw": also to append (`pred`, `kv_write`) and to truncate; this takes write permission.
    "a": as "rw", and a file that is not there is created, empty.

    RuntimeWarning: entries of the file are lost, see `KvStat.lost_tokens`.

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

    If another program creates or removes the file between the two calls, the other one is tried again, once.
    """
    for _ in range(2):
        with suppress(NotFound):
            return (yield from script_of(kv_open)(path, "rw"))
        with suppress(Exists):
            return (yield from script_of(kv_create)(path))
    return (yield from script_of(kv_open)(path, "rw"))


@file_call
def kv_close(kv: KV) -> Script[None]:
    """Closes a file; a second time does nothing. Files also close when the object, or the process, is gone.

    Generations that this handle started are cancelled; other calls of it end first.

    >>> kv = sym.kv_create()
    >>> sym.kv_close(kv)
    >>> kv.closed
    True
    """
    return _close(kv)


def _close(kv: KV) -> Script[None]:
    channel, handle = kv.channel, kv.give_up()
    if handle and channel.alive:  # a dead daemon has closed it already, a fork's parent has to do it itself
        try:
            yield Call(Op.KV_CLOSE, 0, handle)
        except SymError:
            raise
        except BaseException:  # Ctrl-C before it was sent, perhaps: a close too many does no harm
            channel.close_later(handle)
            raise


@system_call
def kv_fork(kv: KV | Path, path: Path | None = None, *, mode: int = 0o600, ended: bool = False) -> Script[KV]:
    """A copy-on-write copy in constant time, open for writing; also of a file that another thread appends to.

    Of an open file, or by its path. `ended`: up to the last ended turn of the conversation in the file, without a turn
    whose answer is under way.

    >>> base = sym.kv_create()
    >>> length = sym.kv_write(base, [1, 2, 3])
    >>> fork = sym.kv_fork(base)
    >>> sym.kv_write(fork, [4]), base.len()
    (4, 3)
    """
    if isinstance(kv, KV):
        return _fork(kv, path, mode, ended=ended)
    return _reading(kv, lambda file: _fork(file, path, mode, ended=ended))


def _fork(kv: KV, path: Path | None, mode: int, *, ended: bool) -> Script[KV]:
    name, payload = _name(path)
    reply = yield Call(Op.KV_FORK, FORK_ENDED if ended else 0, kv.handle, (permissions(mode), 0, 0, 0), payload)
    return opened(reply, name, writable=True)


@system_call
def kv_extract(
    kv: KV | Path, ranges: Iterable[Range], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> Script[KV]:
    """A new file of some entries of `kv`, open for writing; without a path it is anonymous.

    `ranges`: (start, stop) pairs, slices or numbers of single entries, in any order; one may come again. None is the
    beginning or the end, negative numbers count from the end. What lies outside of the file is Invalid: nothing is
    clamped.

    `rebase`: the entries get positions from 0 on, their keys turned accordingly; False: they keep the positions they
    had. Either way an entry stays what it was computed as, after everything that was before it: what is left out has
    left its traces, and what now comes before was not seen. Pages that need no change are shared, not copied.

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
            pairs[-1] = stop  # entries that follow each other are one range: a list of numbers is a short message, too
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
    """Keeps these entries of an anonymous file and drops the others, in place: a cache that has a budget.

    As `kv = kv_extract(kv, ranges, rebase=rebase)`, but whoever has this object goes on with it: a Chat, a loop. Forks
    keep what they have. Generations that the file started are cancelled. A file with a name may be open elsewhere, with
    all of its entries: that is Invalid, and a fork of it is anonymous.

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
    """A new file of all entries of these files, one after the other (at most 256 files); the rest as `kv_extract`.

    Files that were computed apart have not seen each other: merging costs some accuracy against computing them as one
    text, and saves the computing.

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


def _reading(kv: KV | Path, read: Callable[[KV], Script[T]]) -> Script[T]:
    """Run a script that only reads on an open file, or on one that is opened by its path for this alone."""
    if isinstance(kv, KV):
        return (yield from read(kv))
    opened = yield from script_of(kv_open)(kv, "r")
    try:
        return (yield from read(opened))
    finally:
        opened.channel.close_soon(opened.give_up())


@file_call
def kv_lock(kv: KV, *, shared: bool = False, blocking: bool = True) -> Script[Locked]:
    """Takes the lock of a file, as flock(2): exclusive, or `shared` with others that share it.

    It waits until the lock is free, or with `blocking=False` fails with WouldBlock, which names the process and program
    that has it, where this program may see them. The lock is advisory and belongs to
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
    # Who gives up waiting (Ctrl-C, a cancelled task) does not get the lock later: the channel unlocks. One that is
    # converted is given up first.
    kv.is_locked = False
    yield Call(Op.KV_LOCK, flags=(LOCK_SHARED if shared else 0) | (0 if blocking else LOCK_NOWAIT), handle=kv.handle)
    kv.is_locked = True
    return Locked(kv)


@file_call
def kv_unlock(kv: KV) -> Script[None]:
    """Gives the lock of a file back; nothing happens if this handle has none.

    >>> kv = sym.kv_create()
    >>> lock = sym.kv_lock(kv)
    >>> sym.kv_unlock(kv)
    """
    kv.is_locked = False
    yield Call(Op.KV_UNLOCK, handle=kv.handle)


@system_call
def kv_remove(kv: KV | Path) -> Script[None]:
    """Removes a file by its path; or an open file's name (`kv.path`), and closes that file.

    NotFound, and the file stays open, where others have moved it or removed the name since.

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
    """Cuts the file to its first `num_tokens` entries: rollback. Forks keep what they have.

    Generations that this handle started are cancelled; other calls on the file that came before end first.

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
    """Cuts the file to what it has in common with the beginning of `tokens`; gives those that are still to be appended.

    Those are one at least, the last, for a distribution comes after a token. So a fork of any file with a similar text
    serves as a cache: `sym.pred(kv, sym.kv_rewind(kv, tokens))` computes what is new. Positions are not looked at.

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
    """Return the facts of a file: its kind, length, owner, pages and times; and those that only its readers are told.

    Like stat(2), the call needs no permission on the file itself. Without permission to read it, facts that getfattr(1)
    would refuse are None: `exclusive_pages` and the advice.

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
    """The tokens and the positions of all entries, or of those from `start` to `stop`, as a slice has them.

    Of an open file, or by its path.

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
    """In as many messages as it takes; None: the file was cut between two of them."""
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
    """As `KV.room`."""
    info = yield from script_of(model_info)()
    _, positions = yield from _read(kv, -1, None)
    return info.max_positions - 1 - positions[0] if positions else info.max_positions


def checked_flags(flags: Flags, others: str = "") -> int:
    """Return the flags of a request that opens a file. `others`: what the call takes beside these, for the message."""
    if flags not in ("r", "rw"):
        raise Invalid(f"flags={shown(flags)}: 'r' to read and fork, 'rw' to append and cut as well{others}")
    return OPEN_WRITE if flags == "rw" else 0


def opened(reply: Reply, name: str | None, *, writable: bool) -> KV:
    kv = KV(reply.channel, reply.args[0], name, writable=writable, place=(reply.args[2], reply.args[3]))
    reply.claim()  # not before the file has somebody else to close it; closed by both it is closed once
    if lost := int.from_bytes(reply.payload, "little"):
        _warn_of_lost(f"{name}: {reply.args[1]} of its {reply.args[1] + lost} entries are left")
    return kv


def _warn_of_lost(what: str) -> None:
    """Name the line of the program that opened the file, however many frames libsym and an event loop have below it."""
    frame, level = sys._getframe(), 1  # noqa: SLF001 - warnings count frames, too
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "libsym":  # exec() may have no name
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{what}: see symphony help user.kv.lost", RuntimeWarning, stacklevel=level)


def _name(path: Path | None) -> tuple[str | None, bytes]:
    """Return the name of a new file, and its bytes in a request."""
    if path is None:
        return None, b""
    name = path_text(path)
    return name, path_bytes(name)


def _range_ends(wanted: Range) -> tuple[int, int]:
    """Return both ends of a range as they go over the wire; the daemon resolves ends that count from the last entry."""
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
