"""A file that is open at the daemon: a handle, and what becomes of it when the object goes."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import ref

from libsym.abi import RANGE_END, Op
from libsym.arguments import shown
from libsym.channel.client import ClientChannel
from libsym.channel.scripts import Call, Script
from libsym.errors import BadHandle, Invalid

_INTERNAL = frozenset({"give_up", "moved", "named", "num_cuts", "talker"})


class OpenFile:
    """A handle on a connection. It is given back with the next call after the object is gone, if not before."""

    __slots__ = (
        "__weakref__",
        "_channel",
        "_handle",
        "_place",
        "is_locked",
        "num_cuts",
        "path",
        "talker",
        "writable",
    )

    def __init__(
        self,
        channel: ClientChannel,
        handle: int,
        path: str | None,
        *,
        writable: bool,
        place: tuple[int, int] = (0, 0),
    ) -> None:
        """`place`: the numbers of the inode, and of the directory that has its name."""
        self._channel = channel
        self._handle = handle
        self._place = place
        self.path = path
        """The name that it was opened by, or that this program gave it or moved it to since; None: it has none."""
        self.writable = writable
        self.num_cuts = 0
        """Truncations by this handle."""
        self.is_locked = False
        """Whether this handle has the file's lock, shared perhaps."""
        self.talker: ref[Any] | None = None
        """The conversation that talks in it by this handle, or did."""
        if path is not None:
            channel.named_files[handle] = self

    def named(self, path: str, inode: int, directory: int) -> None:
        """The program gave an anonymous file a name."""
        self.path, self._place = path, (inode, directory)
        self._channel.named_files[self._handle] = self

    def moved(self, old: str, new: str, inode: int, left: int, entered: int) -> None:
        """The program moved a name: this file's perhaps."""
        if self._place == (inode, left) and self.path is not None and _last(self.path) == _last(old):
            self.path, self._place = new, (inode, entered)

    @property
    def handle(self) -> int:
        """The number that the daemon knows the file by, on this connection."""
        if self._handle == 0:
            raise BadHandle(f"{self.name} is closed: open it again")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def channel(self) -> ClientChannel:
        """The connection that the file is open on."""
        return self._channel

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return "this anonymous KV file" if self.path is None else self.path

    def give_up(self) -> int:
        """The handle, for whoever closes it now: to the program the file is closed. 0: it was already."""
        handle, self._handle = self._handle, 0
        return handle

    def __dir__(self) -> list[str]:
        """Names that programs use; libsym's own modules know the others."""
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __repr__(self) -> str:
        state = f"handle {self._handle}" if self._handle else "closed"
        return f"<{type(self).__name__} {self.path or 'anonymous'}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            f"{self.name} can't be copied or pickled: fork() copies it, kv_open() opens it in another process"
        )

    def __del__(self) -> None:
        # Must not wait and must not fail: the channel sends the close with the next call.
        if getattr(self, "_handle", 0):
            self._channel.close_later(self.give_up())


def exchange(one: OpenFile, other: OpenFile) -> None:
    """Exchange two anonymous files of one connection: each object becomes the other file."""
    one._handle, other._handle = other._handle, one._handle  # noqa: SLF001 - of this module's own class
    one._place, other._place = other._place, one._place  # noqa: SLF001
    one.is_locked, other.is_locked = other.is_locked, one.is_locked
    one.num_cuts += 1


def _last(path: str) -> str:
    """The name that a path ends in."""
    return path.rstrip("/").rpartition("/")[2]


def not_open(kv: object, call: str) -> Invalid:
    """The error of a call that takes an open file, and was given something else."""
    return Invalid(f"{call}() takes an open KV file, not {shown(kv)}: kv_open() it first ('rw' to append)")


def channel_of(kv: object, call: str) -> ClientChannel:
    """The connection of the open file that a call was given."""
    if not isinstance(kv, OpenFile):
        raise not_open(kv, call)
    return kv.channel


def length_script(kv: OpenFile) -> Script[int]:
    """Entries in the file now: what a read of none of them tells beside."""
    reply = yield Call(Op.KV_READ, handle=kv.handle, args=(RANGE_END, 0, 0, 0))
    return reply.args[1]
