"""Advice of an owner on a file: a pin, a lease, a TTL, a priority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trio import current_time

from libsym.abi import MAX_PRIORITY, Advice
from libsym.errors import Invalid

MAX_TTL_MS = 10 * 365 * 86_400_000
"""The longest TTL and the longest lease: ten years. A longer time is a mistake, because a TTL of 0 keeps a file for
ever.
"""

PINNED, TTL, PRIORITY = b"user.kv.pinned", b"user.kv.ttl", b"user.kv.priority"
"""Names of the attributes that show advice. Their values are 0 or 1, a number of seconds, and a whole number."""


@dataclass(frozen=True, slots=True)
class FileAdvice:
    """Advice on a file, stored with the inode. All names and versions of a file share the advice. A fork begins without
    advice.
    """

    pinned: bool = False
    """Whether the file is pinned for good. A pinned file's pages stay in memory. The file never expires, whatever its
    TTL is.
    """
    ttl_ms: int = 0
    """Time after the last use at which the file is removed, if no program has it open; 0: never."""
    priority: int = 0
    lease_end_s: float | None = None
    """End of the lease that pins the file, as a time of `trio.current_time()`. A lease also ends when the daemon ends.
    """

    @property
    def ttl_s(self) -> float:
        return self.ttl_ms / 1000

    def left_s(self, now_s: Callable[[], float] = current_time) -> float:
        """Return how many seconds of the lease are left; 0 without a lease."""
        return 0.0 if self.lease_end_s is None else max(0.0, self.lease_end_s - now_s())

    @property
    def is_pinned(self) -> bool:
        """Whether the file is pinned for good or by a lease. A lease that has ended is removed from the advice."""
        return self.pinned or self.lease_end_s is not None


NO_ADVICE = FileAdvice()


def advised(
    old: FileAdvice, advice: Sequence[tuple[int, int]], now_s: Callable[[], float] = current_time
) -> FileAdvice:
    """Apply pieces of advice to `old`, one after the other, and return the result. Each piece is a pair of kind and
    value.
    """
    for kind, value in advice:
        if kind == Advice.PIN and value == 0:
            old = replace(old, pinned=True, lease_end_s=None)
        elif kind == Advice.PIN:
            lease_s = _within(value, 1, MAX_TTL_MS, "a lease in milliseconds") / 1000
            old = replace(old, pinned=False, lease_end_s=now_s() + lease_s)
        elif kind == Advice.UNPIN:
            old = replace(old, pinned=False, lease_end_s=None)
        elif kind == Advice.TTL:
            old = replace(old, ttl_ms=_within(value, 0, MAX_TTL_MS, "a TTL in milliseconds"))
        elif kind == Advice.PRIORITY:
            old = replace(old, priority=_within(value, -MAX_PRIORITY, MAX_PRIORITY, "a priority"))
        elif kind not in {Advice.COLD, Advice.WILLNEED}:  # these two kinds move pages now, and are not stored
            raise Invalid(f"there is no advice {kind}")
    return old


def is_stored(kind: int) -> bool:
    """Whether this kind of advice is stored with the file. Only the owner may give such advice."""
    return kind not in {Advice.COLD, Advice.WILLNEED}


def attributes(advice: FileAdvice) -> dict[bytes, bytes]:
    """Return the advice as extended attributes."""
    return {
        PINNED: b"%d" % advice.is_pinned,
        TTL: f"{advice.ttl_s:.3f}".rstrip("0").rstrip(".").encode(),
        PRIORITY: b"%d" % advice.priority,
    }


def from_attribute(old: FileAdvice, name: bytes, value: bytes) -> FileAdvice:
    """Return the advice after one of the attributes is set. `old`: the advice before that."""
    text = value.decode(errors="replace").strip("\0 \n")
    return advised(old, (_PARSERS[name](text),))


def without_attribute(old: FileAdvice, name: bytes) -> FileAdvice:
    """Return the advice after one of the attributes is removed. `old`: the advice before that."""
    return from_attribute(old, name, b"0")


def _parse_pinned(text: str) -> tuple[int, int]:
    if text not in {"0", "1"}:
        raise Invalid(f"user.kv.pinned is 0 or 1, not {text!r}")
    return (Advice.PIN if text == "1" else Advice.UNPIN), 0


def _parse_ttl(text: str) -> tuple[int, int]:
    whole, dot, part = text.partition(".")
    digits = (whole + part) if dot else whole
    if not (digits.isascii() and digits.isdigit() and len(text) < 20):
        raise Invalid(f"user.kv.ttl is a number of seconds, as 3600 or 0.5, not {text!r}")
    return Advice.TTL, round(float(text) * 1000)


def _parse_priority(text: str) -> tuple[int, int]:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(text) < 5):
        raise Invalid(f"user.kv.priority is a whole number, not {text!r}")
    return Advice.PRIORITY, int(text)


_PARSERS: dict[bytes, Callable[[str], tuple[int, int]]] = {
    PINNED: _parse_pinned,
    TTL: _parse_ttl,
    PRIORITY: _parse_priority,
}


def _within(value: int, least: int, most: int, what: str) -> int:
    if not least <= value <= most:
        raise Invalid(f"{what} is between {least} and {most}, not {value}")
    return value
