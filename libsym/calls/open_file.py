"""Open files of the daemon. Each object has a handle, which is closed when the object is gone."""

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
    """A file's handle on a connection. If the program drops the object without closing it, the next call closes the
    handle.
    """

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
        """Wrap a handle that the daemon opened. `place`: the inode numbers of the file, and of the directory that has
        its name.
        """
        self._channel = channel
        self._handle = handle
        self._place = place
        self.path = path
        """The path by which the program opened or last renamed the file. None: the file is anonymous."""
        self.writable = writable
        self.num_cuts = 0
        """Number of truncations by this handle."""
        self.is_locked = False
        """Whether this handle has the file's lock, exclusive or shared."""
        self.talker: ref[Any] | None = None
        """The conversation that used this handle last."""
        if path is not None:
            channel.named_files[handle] = self

    def named(self, path: str, inode: int, directory: int) -> None:
        """Note the name that the program gave to an anonymous file."""
        self.path, self._place = path, (inode, directory)
        self._channel.named_files[self._handle] = self

    def moved(self, old: str, new: str, inode: int, left: int, entered: int) -> None:
        """Note that the program has renamed a file. If this object has that file open, `path` changes."""
        if self._place == (inode, left) and self.path is not None and _last(self.path) == _last(old):
            self.path, self._place = new, (inode, entered)

    @property
    def handle(self) -> int:
        """The daemon's number for the open file, on this connection. BadHandle: the file is closed."""
        if self._handle == 0:
            raise BadHandle(f"{self.name} is closed: open it again")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def channel(self) -> ClientChannel:
        """The connection on which the file is open."""
        return self._channel

    @property
    def name(self) -> str:
        """The file's name, as error messages show it."""
        return "this anonymous KV file" if self.path is None else self.path

    def give_up(self) -> int:
        """Mark the file as closed, and return the handle, which the caller closes. 0: the file was closed already."""
        handle, self._handle = self._handle, 0
        return handle

    def __dir__(self) -> list[str]:
        """List the names for programs, without those for libsym's own modules."""
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __repr__(self) -> str:
        state = f"handle {self._handle}" if self._handle else "closed"
        return f"<{type(self).__name__} {self.path or 'anonymous'}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            f"{self.name} can't be copied or pickled: fork() copies it, kv_open() opens it in another process"
        )

    def __del__(self) -> None:
        # A finalizer must not wait or fail, so the channel sends the close with the next call.
        if getattr(self, "_handle", 0):
            self._channel.close_later(self.give_up())


def exchange(one: OpenFile, other: OpenFile) -> None:
    """Exchange the files of two objects. Both files must be anonymous, and open on the same connection."""
    one._handle, other._handle = other._handle, one._handle  # noqa: SLF001 - of this module's own class
    one._place, other._place = other._place, one._place  # noqa: SLF001
    one.is_locked, other.is_locked = other.is_locked, one.is_locked
    one.num_cuts += 1


def _last(path: str) -> str:
    """Return the last name of a path."""
    return path.rstrip("/").rpartition("/")[2]


def not_open(kv: object, call: str) -> Invalid:
    """Return the error for a call that needs an open file and got another object."""
    return Invalid(f"{call}() takes an open KV file, not {shown(kv)}: kv_open() it first ('rw' to append)")


def channel_of(kv: object, call: str) -> ClientChannel:
    """Return the connection of an open file. Invalid: `kv`, the argument of `call`, is not an open file."""
    if not isinstance(kv, OpenFile):
        raise not_open(kv, call)
    return kv.channel


def length_script(kv: OpenFile) -> Script[int]:
    """Return the number of entries in the file now. The reply to a read of no entries has this number."""
    reply = yield Call(Op.KV_READ, handle=kv.handle, args=(RANGE_END, 0, 0, 0))
    return reply.args[1]
