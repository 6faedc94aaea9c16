"""Things that users make the daemon keep in its own memory, beside pages and the bytes of plain files.

Each thing is charged when it is made, and taken back when it has gone, with a *weight*: the bytes of memory that it
takes at most. `scripts/attacks/hoard.py` measures that none takes more. All that a user has together stays within one
bound (`Limits.memory_bytes`), so no kind needs a bound of its own.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from libsym.errors import OverQuota


class Kind(StrEnum):
    """A kind of things that the daemon keeps for users."""

    FILE = "files"
    """Inodes of any type, and each further name of one."""
    HANDLE = "handles"
    """KV files that programs have open, with the lock and the claim that each may have."""
    OPEN = "opens"
    """KV files, directories and control files that are open on the mount, with the lock that each may have."""
    PLAIN = "open plain files"
    """Plain files that are open there; each has a descriptor, too."""
    DOMAIN = "domains"
    """Directories with quotas of their own; each counts every page."""
    VERSION = "versions"
    """Versions of KV files that the kernel has looked up and not forgotten."""
    CALL = "calls"
    """Calls of programs that wait."""
    REQUEST = "requests"
    """Requests of the mount that wait."""
    FRAME = "frames"
    """Large requests under way."""
    MESSAGE = "messages"
    """Messages that were not received."""
    TOPIC = "topics"
    """Topics that a connection reads."""
    TEXT = "texts"
    """Texts that are being written."""
    CONNECTION = "connections"
    """Programs that are connected."""


WEIGHTS = {
    Kind.FILE: 6144,
    Kind.HANDLE: 3072,
    Kind.OPEN: 3072,
    Kind.PLAIN: 3072,
    Kind.DOMAIN: 8192,
    Kind.VERSION: 1024,
    Kind.CALL: 8192,
    Kind.REQUEST: 12288,
    Kind.FRAME: 0,
    Kind.MESSAGE: 768,
    Kind.TOPIC: 1536,
    Kind.TEXT: 192 << 10,
    Kind.CONNECTION: 128 << 10,
}
"""Bytes of one thing. A thing of no fixed size is charged its own bytes besides."""

LASTING = frozenset({Kind.FILE, Kind.DOMAIN})
"""Kinds that stay when a user's programs have ended. Their removal takes handles (`rm -r` opens directories)."""
HANDLES_PART = 8
"""The part of a bound that is left to things that do not last: one in so many."""


class Holdings:
    """Things that the daemon keeps for one user; together they may weigh `limit_bytes`."""

    __slots__ = ("bytes_of", "describe", "limit_bytes", "num_bytes", "num_of")

    def __init__(self, describe: Callable[[], str] = lambda: "nobody", limit_bytes: int | None = None) -> None:
        self.describe = describe
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_of = Counter[Kind]()
        self.bytes_of = Counter[Kind]()

    def require(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Raise OverQuota unless there is room for so many things more, and for bytes beside their weights."""
        if not self.has_room(kind, count, num_bytes):
            kinds = sorted(self.num_of, key=lambda each: -self.bytes_of[each])
            told = ", ".join(f"{self.num_of[each]} {each}" for each in kinds[:3]) or "nothing"
            raise OverQuota(
                f"{self.describe()} is at its quota of {self.limit_bytes} bytes of the daemon's memory: it has {told}; "
                "close or remove some, or have the quota raised"
            )

    def has_room(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> bool:
        wanted = WEIGHTS[kind] * count + num_bytes
        if self.limit_bytes is None or wanted <= 0:
            return True
        most_lasting = self.limit_bytes - self.limit_bytes // HANDLES_PART
        if kind in LASTING:
            return self.num_bytes + wanted <= most_lasting
        # Files of before a smaller bound leave others their part: their owner could not remove them.
        excess = max(0, sum(self.bytes_of[each] for each in LASTING) - most_lasting)
        return self.num_bytes - excess + wanted <= self.limit_bytes

    def hold(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Charge things that the daemon keeps from now on, or raise OverQuota."""
        self.require(kind, count, num_bytes)
        self.charge(kind, count, num_bytes)

    def charge(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """As `hold`, of things that can't be refused, or that `require` was asked about."""
        num_bytes += WEIGHTS[kind] * count
        self.num_bytes += num_bytes
        self.num_of[kind] += count
        self.bytes_of[kind] += num_bytes
        left = self.num_of[kind], self.bytes_of[kind]
        assert min(left) >= 0, f"{self.describe()} gives back {kind} that it does not have"
        if left == (0, 0):
            del self.num_of[kind], self.bytes_of[kind]

    def let_go(self, kind: Kind, count: int = 1, num_bytes: int = 0) -> None:
        """Take back the charge of things that have gone."""
        self.charge(kind, -count, -num_bytes)

    def facts(self) -> dict[str, int]:
        """Numbers of things by kind, the heaviest first."""
        return {str(kind): self.num_of[kind] for kind in sorted(self.num_of, key=lambda each: -self.bytes_of[each])}
