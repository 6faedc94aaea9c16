"""Things that the daemon keeps in its own memory for users. Pages and the bytes of plain files do not count.

Each thing is charged when it is made, and refunded when it is freed. The charge is its *weight*: the most bytes of
memory that it takes. `scripts/attacks/hoard.py` measures that no thing takes more. All things of a user together stay
within one bound (`AccountLimits.memory_bytes`), so no kind needs a bound of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from kvfs._pages import ffi, lib
from libsym.errors import OverQuota


class Kind(IntEnum):
    """A kind of thing that the daemon keeps for users."""

    FILE = lib.CORE_FILE
    """Inodes of any type, and each further name of an inode."""
    HANDLE = lib.CORE_HANDLE
    """KV files that programs have open, with the lock and the claim that each may have."""
    OPEN = lib.CORE_OPEN
    """KV files, directories and control files that are open on the mount, with the lock that each may have."""
    PLAIN = lib.CORE_PLAIN
    """Plain files that are open on the mount. Each has a descriptor as well."""
    DOMAIN = lib.CORE_DOMAIN
    """Directories with quotas of their own. Each has a count for every page."""
    VERSION = lib.CORE_VERSION
    """Versions of KV files that the kernel has looked up and not forgotten."""
    CALL = lib.CORE_CALL
    """Waiting calls of programs."""
    REQUEST = lib.CORE_REQUEST
    """Waiting requests of the mount."""
    FRAME = lib.CORE_FRAME
    """Large requests under way."""
    MESSAGE = lib.CORE_MESSAGE
    """Messages that their recipient has not received."""
    TOPIC = lib.CORE_TOPIC
    """Topics that a connection reads."""
    TEXT = lib.CORE_TEXT
    """Texts that are being written."""
    CONNECTION = lib.CORE_CONNECTION
    """Programs that are connected."""

    @property
    def word(self) -> str:
        """The word for things of this kind in messages."""
        return "open plain files" if self is Kind.PLAIN else f"{self.name.lower()}s"


WEIGHTS = {kind: int(lib.core_weights[kind]) for kind in Kind}
"""Weight of one thing of each kind, in bytes. Things of variable size are charged their own bytes as well."""


class Holdings:
    """Things that the daemon keeps for one user, with `limit_bytes` as the bound of their weight."""

    __slots__ = ("core", "describe")

    def __init__(self, describe: Callable[[], str] = lambda: "nobody", limit_bytes: int | None = None) -> None:
        self.describe = describe
        self.core = ffi.new("core_holdings *")
        self.limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The most that all things may weigh. None: no limit."""
        limit = int(self.core.limit_bytes)
        return None if limit < 0 else limit

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        self.core.limit_bytes = -1 if limit_bytes is None else limit_bytes

    @property
    def num_bytes(self) -> int:
        """The weight of all things together."""
        return int(self.core.num_bytes)

    def require(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Raise OverQuota unless there is room for `count` more things, and for `num_bytes` in addition to their
        weights.
        """
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
        """Charge things that can't be refused, or that `require` has passed."""
        outcome = lib.core_hold(self.core, kind, count, num_bytes)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back {kind.word} that it does not have"

    def let_go(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Refund things that are freed."""
        self.charge(kind, -count, -num_bytes)

    def facts(self) -> dict[str, int]:
        """Return the number of things of each kind, the heaviest kind first."""
        heaviest = sorted(Kind, key=lambda kind: self.core.bytes_of[kind], reverse=True)
        return {kind.word: self.core.num_of[kind] for kind in heaviest if self.core.num_of[kind]}
