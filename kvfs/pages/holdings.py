"""Things that users make the daemon keep in its own memory, beside pages and the bytes of plain files.

Each thing is charged when it is made, and taken back when it has gone, with a *weight*: the bytes of memory that it
takes at most. `scripts/attacks/hoard.py` measures that none takes more. All that a user has together stays within one
bound (`Limits.memory_bytes`), so no kind needs a bound of its own.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from kvfs._pages import ffi, lib
from libsym.errors import OverQuota


class Kind(IntEnum):
    """A kind of things that the daemon keeps for users."""

    FILE = lib.CORE_FILE
    """Inodes of any type, and each further name of one."""
    HANDLE = lib.CORE_HANDLE
    """KV files that programs have open, with the lock and the claim that each may have."""
    OPEN = lib.CORE_OPEN
    """KV files, directories and control files that are open on the mount, with the lock that each may have."""
    PLAIN = lib.CORE_PLAIN
    """Plain files that are open there; each has a descriptor, too."""
    DOMAIN = lib.CORE_DOMAIN
    """Directories with quotas of their own; each counts every page."""
    VERSION = lib.CORE_VERSION
    """Versions of KV files that the kernel has looked up and not forgotten."""
    CALL = lib.CORE_CALL
    """Calls of programs that wait."""
    REQUEST = lib.CORE_REQUEST
    """Requests of the mount that wait."""
    FRAME = lib.CORE_FRAME
    """Large requests under way."""
    MESSAGE = lib.CORE_MESSAGE
    """Messages that were not received."""
    TOPIC = lib.CORE_TOPIC
    """Topics that a connection reads."""
    TEXT = lib.CORE_TEXT
    """Texts that are being written."""
    CONNECTION = lib.CORE_CONNECTION
    """Programs that are connected."""

    @property
    def word(self) -> str:
        """Things of the kind, for messages."""
        return "open plain files" if self is Kind.PLAIN else f"{self.name.lower()}s"


WEIGHTS = {kind: int(lib.core_weights[kind]) for kind in Kind}
"""Bytes of one thing. A thing of no fixed size is charged its own bytes besides."""


class Holdings:
    """Things that the daemon keeps for one user; together they may weigh `limit_bytes`."""

    __slots__ = ("core", "describe")

    def __init__(self, describe: Callable[[], str] = lambda: "nobody", limit_bytes: int | None = None) -> None:
        self.describe = describe
        self.core = ffi.new("core_holdings *")
        self.limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The most that all things may weigh; None: as much as there is."""
        limit = int(self.core.limit_bytes)
        return None if limit < 0 else limit

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        self.core.limit_bytes = -1 if limit_bytes is None else limit_bytes

    @property
    def num_bytes(self) -> int:
        """The weight of all things."""
        return int(self.core.num_bytes)

    def require(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Raise OverQuota unless there is room for so many things more, and for bytes beside their weights."""
        if not self.has_room(kind, count, num_bytes):
            told = ", ".join(f"{num} {word}" for word, num in list(self.facts().items())[:3]) or "nothing"
            raise OverQuota(
                f"{self.describe()} is at its quota of {self.limit_bytes} bytes of the daemon's memory: it has {told}; "
                "close or remove some, or have the quota raised"
            )

    def has_room(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> bool:
        """Return whether `require` would raise no error."""
        return bool(lib.core_may_hold(self.core, kind, count, num_bytes))

    def hold(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Charge things that the daemon keeps from now on, or raise OverQuota."""
        self.require(kind, count, num_bytes)
        self.charge(kind, count, num_bytes)

    def charge(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Charge things that can't be refused, or that `require` was asked about."""
        outcome = lib.core_hold(self.core, kind, count, num_bytes)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back {kind.word} that it does not have"

    def let_go(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Take back the charge of things that have gone."""
        self.charge(kind, -count, -num_bytes)

    def facts(self) -> dict[str, int]:
        """Numbers of things by kind, the heaviest first."""
        heaviest = sorted(Kind, key=lambda kind: self.core.bytes_of[kind], reverse=True)
        return {kind.word: self.core.num_of[kind] for kind in heaviest if self.core.num_of[kind]}
