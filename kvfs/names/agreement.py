"""Names that several machines share: a machine makes a change only after all of them have agreed on it.

A call that changes such a name, or opens such a file, raises `Unsettled` before it has changed anything. Whoever runs
the call waits for the other machines (`when_settled`), and runs the call again with a `Grant`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kvfs.names.inode import Inode
from libsym.errors import Busy, NotSupported

_Result = TypeVar("_Result")

MAX_NEEDS = 32
"""Maximum number of agreements for one call. A call needs three, and more only if other machines change the same names.
"""


@dataclass(frozen=True, slots=True)
class Make:
    """A call needs to make an inode under a new name."""

    directory: Inode
    name: bytes
    file_type: int
    mode: int
    uid: int
    gid: int
    target: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """A call needs to remove a name, with its file or its empty directory."""

    directory: Inode
    name: bytes
    inode: Inode


@dataclass(frozen=True, slots=True)
class Rename:
    """A call needs to move a name."""

    source: Inode
    name: bytes
    moved: Inode
    target: Inode
    new_name: bytes
    replaced: Inode | None


@dataclass(frozen=True, slots=True)
class SetMode:
    """A call needs to set the mode and the owner of an inode."""

    inode: Inode
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Open:
    """A call needs the last version of a file, and perhaps the right to write it."""

    inode: Inode
    writable: bool
    is_emptied: bool
    """Whether the call empties the file, so that the last version is not needed."""


@dataclass(frozen=True, slots=True)
class Look:
    """A call needs the names of a directory as they are now."""

    directory: Inode


Need: TypeAlias = Make | Remove | Rename | SetMode | Open | Look


class Grant(Protocol):
    """The agreement on what one call needs. The call may make its change once."""

    def covers(self, need: Need) -> bool: ...

    def is_used(self, inode: Inode) -> None:
        """Note that the change was made. `inode`: the inode that was made, moved or removed."""
        ...

    def end(self) -> None:
        """Note that the call has ended, whether it has made its change or not."""
        ...


class Agreement(Protocol):
    """The machines that share names. The trio thread calls all methods."""

    root: Inode
    """The directory of the shared names."""
    local: Inode
    """A directory in `root` whose files belong to this machine alone."""

    def knows(self, inode: Inode) -> bool:
        """Whether the inode has a shared name, or is the root."""
        ...

    def is_open(self, inode: Inode, *, writable: bool) -> bool:
        """Whether a call may open the file without an agreement, because this machine has the right to write it."""
        ...

    async def settle(self, need: Need) -> Grant | None:
        """Agree on what a call needs. None: something else has changed, which is known here by now."""
        ...

    async def sync_all(self) -> None:
        """Sync all files that were written here."""
        ...

    async def sync(self, inode: Inode) -> None:
        """Return when the file's present content is the last version for all machines."""
        ...

    def num_lost(self, inode: Inode) -> int:
        """Return how often another machine's version has taken the place of a content that was not synced."""
        ...

    def begin_writing(self, inode: Inode) -> None:
        """Note a handle that may write to the file."""
        ...

    def end_writing(self, inode: Inode) -> None:
        """Note that a handle that may write was closed."""
        ...


class Unsettled(NotSupported):
    """Error of a call that needs an agreement, for calls that can't wait for one."""

    def __init__(self, agreement: Agreement, need: Need) -> None:
        super().__init__("this call can't wait for other machines: make the file elsewhere, and fork it to the fleet")
        self.agreement, self.need = agreement, need


_GRANTS: ContextVar[tuple[Grant, ...]] = ContextVar("grants", default=())


class Everything:
    """The grant of a task that makes changes which other machines have agreed on."""

    def covers(self, _need: Need) -> bool:
        return True

    def is_used(self, inode: Inode) -> None:
        """Do nothing: the task itself knows what it makes."""

    def end(self) -> None:
        """Do nothing: the task goes on."""


def grant_everything() -> None:
    """Let the present task make all changes."""
    _GRANTS.set((Everything(),))


@contextmanager
def granted() -> Iterator[None]:
    """Grant everything to calls in a `with` block, which must not wait."""
    before = _GRANTS.set((Everything(),))
    try:
        yield
    finally:
        _GRANTS.reset(before)


def is_granted_everything() -> bool:
    """Whether the present task makes changes which other machines have agreed on."""
    return any(isinstance(grant, Everything) for grant in _GRANTS.get())


def require_settled(agreement: Agreement, need: Need) -> Grant:
    """Return the grant of what a call needs, or raise Unsettled."""
    for grant in _GRANTS.get():
        if grant.covers(need):
            return grant
    raise Unsettled(agreement, need)


async def when_settled(attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Repeat an attempt until it needs no more agreements. Errors of the other machines, and of the way to them, end
    it.
    """
    grants: tuple[Grant, ...] = ()
    try:
        for _ in range(MAX_NEEDS):
            before = _GRANTS.set(grants)
            try:
                return await attempt()
            except Unsettled as error:
                unsettled = error
            finally:
                _GRANTS.reset(before)
            grant = await unsettled.agreement.settle(unsettled.need)
            grants = grants if grant is None else (*grants, grant)
    finally:
        for grant in grants:
            grant.end()
    raise Busy("other machines of the fleet change the same names all the time: try again")
