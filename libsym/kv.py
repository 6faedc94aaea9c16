"""KV files as Python objects: a handle at the daemon, closed when the object is."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Literal, NoReturn, Self

from libsym.abi import (
    LOCK_NOWAIT,
    LOCK_SHARED,
    OPEN_WRITE,
    RANGE_END,
    REBASE,
    ROWS_ALL,
    ROWS_LAST,
    ROWS_NONE,
    Op,
)
from libsym.client_channel import ClientChannel, Reply
from libsym.dist import Dist
from libsym.errors import BadHandle, Invalid, SymError
from libsym.info import KvStat

Path = str | os.PathLike[str]
Flags = Literal["r", "rw"]
Rows = Literal["last", "all"]
Range = slice | range | Sequence[int | None]
"""Entries: a slice, or (start, stop). None is the beginning or the end, negative numbers count from the end."""

_ROWS = {"last": ROWS_LAST, "all": ROWS_ALL}


class KV:
    """An open KV file. Any number of threads may use it; appends take effect one after the other.

    It is closed by `close()`, by the end of a `with` block, or with the next call after the object is gone. An
    anonymous file (`path` is None) is gone with its last handle.
    """

    __slots__ = ("__weakref__", "_channel", "_handle", "path", "writable")

    def __init__(self, channel: ClientChannel, handle: int, path: str | None, *, writable: bool) -> None:
        self._channel = channel
        self._handle = handle
        self.path = path
        self.writable = writable

    @property
    def handle(self) -> int:
        """The number that the daemon knows the file by, on this connection."""
        if self._handle == 0:
            raise BadHandle(f"{self._name} is closed: open it again")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def channel(self) -> ClientChannel:
        """The connection that the file is open on."""
        return self._channel

    @property
    def _name(self) -> str:
        return "this anonymous KV file" if self.path is None else self.path

    def __repr__(self) -> str:
        state = f"handle {self._handle}" if self._handle else "closed"
        return f"<KV {self.path or 'anonymous'}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            f"{self._name} can't be copied or pickled: fork() copies it, kv_open() opens it in another process"
        )

    def __del__(self) -> None:
        # Must not wait and must not fail: the channel sends the close with the next call.
        if getattr(self, "_handle", 0):
            self._channel.close_later(self._handle)
            self._handle = 0

    def close(self) -> None:
        """Closes the handle; a second time does nothing."""
        handle, self._handle = self._handle, 0
        if handle and self._channel.alive:  # a dead daemon has closed it already, a fork's parent has to do it itself
            self._channel.call(Op.KV_CLOSE, handle=handle)

    def fork(self, path: Path | None = None, *, mode: int = 0o600) -> KV:
        """A copy-on-write copy of what is in the file now, open for writing, in constant time."""
        name = None if path is None else path_text(path)
        reply = self._channel.call(
            Op.KV_FORK, handle=self.handle, args=(mode, 0, 0, 0), payload=b"" if name is None else path_bytes(name)
        )
        return opened(self._channel, reply, name, writable=True)

    def extract(
        self, ranges: Iterable[Range], path: Path | None = None, *, rebase: bool = True, mode: int = 0o600
    ) -> KV:
        """A new file of some of the entries: see `libsym.kv_extract`."""
        if not isinstance(ranges, Iterable):
            raise Invalid(f"ranges={ranges!r}: give a list of (start, stop) pairs, or of slices")
        pairs = array("q", (end for each in ranges for end in _range_ends(each)))
        return _assembled(
            self._channel, Op.KV_EXTRACT, pairs, len(pairs) // 2, path, rebase=rebase, mode=mode, handle=self.handle
        )

    def lock(self, *, shared: bool = False, blocking: bool = True) -> Locked:
        """Takes the file's lock, as flock(2): see `libsym.kv_lock`."""
        flags = (LOCK_SHARED if shared else 0) | (0 if blocking else LOCK_NOWAIT)
        try:
            self._channel.call(Op.KV_LOCK, flags=flags, handle=self.handle)
        except SymError:
            raise
        except BaseException:  # Ctrl-C while it waited: without this it would be granted to nobody
            with suppress(SymError):
                self.unlock()
            raise
        return Locked(self)

    def unlock(self) -> None:
        """Gives the lock up; nothing happens if there is none. Closing the file does it, too."""
        self._channel.call(Op.KV_UNLOCK, handle=self.handle)

    def remove(self) -> None:
        """Removes the name that the file was opened by, and closes it. Other handles and forks keep what they have."""
        if self.path is not None:
            self._channel.call(Op.KV_REMOVE, handle=self.handle)
        self.close()

    def truncate(self, num_tokens: int) -> None:
        """Cuts the file to its first `num_tokens` entries."""
        if num_tokens < 0:
            raise Invalid(f"cannot cut {self._name} to {num_tokens} entries: 0 is the least")
        self._channel.call(Op.KV_TRUNCATE, handle=self.handle, args=(num_tokens, 0, 0, 0))

    def stat(self) -> KvStat:
        return KvStat.from_json(self._channel.call(Op.KV_STAT, handle=self.handle).payload)

    def len(self) -> int:
        """Entries in the file now."""
        return self.stat().tokens

    def __len__(self) -> int:
        return self.len()

    def __bool__(self) -> bool:
        return True  # an empty file is a file

    def read(self, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
        """The tokens and the positions of all entries, or of those from `start` to `stop`, as a slice has them.

        What is read was in the file at one time, however long it is and whatever others do to it meanwhile.
        """
        while (found := self._read(start, slice(start, stop))) is None:
            pass
        return found

    def _read(self, start: int, wanted: slice) -> tuple[list[int], list[int]] | None:
        """In as many messages as it takes; None: the file was cut between two of them."""
        reply = self._channel.call(Op.KV_READ, handle=self.handle, args=(max(0, start), 0, 0, 0))
        _, length, cuts, _ = reply.args
        first, stop, _ = wanted.indices(length)
        tokens, positions = array("i"), array("i")
        if start >= 0:
            _take_entries(reply, max(stop - first, 0), tokens, positions)
        while first + len(tokens) < stop:
            at = first + len(tokens)
            reply = self._channel.call(Op.KV_READ, handle=self.handle, args=(at, stop - at, 0, 0))
            if reply.args[2] != cuts:
                return None
            _take_entries(reply, stop - at, tokens, positions)
        return tokens.tolist(), positions.tolist()

    def pred(self, tokens: Iterable[int], positions: int | Sequence[int] | None = None, *, rows: Rows = "last") -> Dist:
        """Appends tokens and gives the distribution of what follows: see `libsym.pred`."""
        if rows not in ("last", "all"):
            raise Invalid(f"rows={rows!r}: 'last' for the distribution after the last token, 'all' for one after each")
        reply = self._append(tokens, positions, _ROWS[rows])
        return Dist(reply.rows(), reply.args[1], self._channel.slot_bytes, self._channel.vocab_size)

    def write(self, tokens: Iterable[int], positions: int | Sequence[int] | None = None) -> int:
        """Appends tokens without asking for a distribution; gives the new length."""
        return self._append(tokens, positions, ROWS_NONE).args[2]

    def _append(self, tokens: Iterable[int], positions: int | Sequence[int] | None, flags: int) -> Reply:
        ids = int32(tokens, "token")
        places = array("i")
        if isinstance(positions, (int, Integral)):
            places = int32((int(positions),), "position")
        elif positions is not None:
            places = int32(positions, "position")
            if len(places) != len(ids):
                raise Invalid(
                    f"{len(ids)} tokens and {len(places)} positions: give one for each, or the first as a number"
                )
        return self._channel.call(
            Op.PRED,
            flags=flags,
            handle=self.handle,
            args=(len(ids), len(places), 0, 0),
            payload=ids.tobytes() + places.tobytes(),
        )


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


def merge(channel: ClientChannel, kvs: Iterable[KV], path: Path | None, *, rebase: bool, mode: int) -> KV:
    if not isinstance(kvs, Iterable):
        raise Invalid(f"kv_merge() takes a list of open files, not {kvs!r}")
    handles = array("Q")
    for kv in kvs:
        if not isinstance(kv, KV):
            raise Invalid(f"kv_merge() takes open files, not {kv!r}: kv_open() each first")
        if kv.channel is not channel:
            raise BadHandle(f"{kv!r} belongs to an earlier connection of this program: open it again")
        handles.append(kv.handle)
    return _assembled(channel, Op.KV_MERGE, handles, len(handles), path, rebase=rebase, mode=mode)


def _assembled(
    channel: ClientChannel,
    op: Op,
    numbers: array[int],
    rows: int,
    path: Path | None,
    *,
    rebase: bool,
    mode: int,
    handle: int = 0,
) -> KV:
    name = None if path is None else path_text(path)
    payload = numbers.tobytes() + (b"" if name is None else path_bytes(name))
    flags = REBASE if rebase else 0
    reply = channel.call(op, flags=flags, handle=handle, args=(mode, rows, 0, 0), payload=payload)
    return opened(channel, reply, name, writable=True)


def _range_ends(wanted: Range) -> tuple[int, int]:
    """Both ends of a range as they go over the wire; the daemon resolves what counts from the end."""
    if isinstance(wanted, (slice, range)):
        if wanted.step not in (None, 1):
            raise Invalid(f"{wanted} skips entries: give a range for each piece")
        start, stop = wanted.start, wanted.stop
    else:
        try:
            start, stop = wanted
        except (TypeError, ValueError):
            raise Invalid(f"{wanted!r} is no range: give (start, stop) pairs, or slices") from None
    first, last = int64(0 if start is None else start), RANGE_END if stop is None else int64(stop)
    return first, last


def _take_entries(reply: Reply, most: int, tokens: array[int], positions: array[int]) -> None:
    numbers, count = array("i", reply.payload), reply.args[0]
    tokens += numbers[: min(count, most)]
    positions += numbers[count : count + min(count, most)]


def create(channel: ClientChannel, path: Path | None, mode: int) -> KV:
    name = None if path is None else path_text(path)
    payload = b"" if name is None else path_bytes(name)
    return opened(channel, channel.call(Op.KV_CREATE, args=(mode, 0, 0, 0), payload=payload), name, writable=True)


def open_file(channel: ClientChannel, path: Path, flags: Flags) -> KV:
    if flags not in ("r", "rw"):
        raise Invalid(f"flags={flags!r}: 'r' to read and fork, 'rw' to append and cut as well")
    name = path_text(path)
    writable = flags == "rw"
    reply = channel.call(Op.KV_OPEN, flags=OPEN_WRITE if writable else 0, payload=path_bytes(name))
    return opened(channel, reply, name, writable=writable)


def opened(channel: ClientChannel, reply: Reply, path: str | None, *, writable: bool) -> KV:
    return KV(channel, reply.claim(), path, writable=writable)


def path_text(path: Path) -> str:
    """A path as the daemon takes it."""
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise Invalid(f"a path must be text, not {type(path).__name__}")
    if not text or "\0" in text:
        raise Invalid(f"{text!r} is no path: it is empty or has a NUL in it")
    return text


def path_bytes(path: str) -> bytes:
    """Names are bytes to the kernel; what was no UTF-8 there comes back as it was."""
    return utf8(path, "a path", "surrogateescape")


def utf8(text: str, what: str, errors: str = "strict") -> bytes:
    if not isinstance(text, str):
        raise Invalid(f"{what} must be text, not {type(text).__name__}")
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise Invalid(f"{what} has half a surrogate pair at character {error.start}, no Unicode text") from error


def int64(number: object) -> int:
    if not isinstance(number, (int, Integral)) or not -RANGE_END <= int(number) <= RANGE_END:
        raise Invalid(f"{number!r} is no entry's number: give a whole number of 64 bits")
    return int(number)


def int32(numbers: Iterable[int], what: str) -> array[int]:
    """Token ids or positions as they go over the wire."""
    if isinstance(numbers, (str, bytes, bytearray)):
        raise Invalid(f"{what}s must be a list of whole numbers, not {type(numbers).__name__} (see tokenize())")
    try:
        return array("i", numbers)
    except OverflowError as error:
        raise Invalid(f"a {what} does not fit 32 bits") from error
    except TypeError as error:
        raise Invalid(f"{what}s must be a list of whole numbers ({error})", errno.EINVAL) from error
