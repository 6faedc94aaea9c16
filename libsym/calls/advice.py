"""Advice: a program tells the daemon how it will use its files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libsym.abi import ADVISED_STRUCT, MAX_ADVICE, RANGE_END, Advice, Op
from libsym.arguments import Path, int64, path_bytes, shown
from libsym.calls.faces import system_call
from libsym.calls.kv import KV
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid


@dataclass(frozen=True, slots=True)
class Advised:
    """A piece of advice with its value, as `kv_advise` takes it.

    >>> sym.TTL(60) == sym.TTL(60), sym.PIN == sym.UNPIN
    (True, False)
    """

    advice: Advice
    value: int = 0


@dataclass(frozen=True, slots=True)
class Pinning(Advised):
    """The type of `PIN`, which pins a file until UNPIN. `PIN(seconds)` pins it for that time.

    >>> sym.PIN
    Pinning(advice=<Advice.PIN: 1>, value=0)
    """

    def __call__(self, seconds: float) -> Advised:
        """Return the advice to pin a file for some seconds: a lease.

        >>> sym.PIN(60)
        Pinning(advice=<Advice.PIN: 1>, value=60000)
        """
        if not isinstance(seconds, (int, float)) or not 0 < seconds * 1000 <= RANGE_END:
            raise Invalid(f"PIN({shown(seconds)}): give a number of seconds above 0, at most ten years")
        return Pinning(Advice.PIN, math.ceil(seconds * 1000))


PIN = Pinning(Advice.PIN)
"""Advice: keep the file despite its TTL, and keep its pages in memory. `PIN(seconds)` does so for a limited time."""
UNPIN = Advised(Advice.UNPIN)
"""Advice: unpin the file, and end its lease."""
COLD = Advised(Advice.COLD)
"""Advice: the program will not use the file soon, so the daemon may move its pages to disk."""
WILLNEED = Advised(Advice.WILLNEED)
"""Advice: the program will use the file soon. The daemon brings the file's pages into memory if they fit."""


def TTL(seconds: float) -> Advised:  # noqa: N802 - advice is in capitals, as in madvise(2)
    """Advice: remove the file some seconds after its last use, unless it is open or pinned. 0: never.

    >>> sym.TTL(3600)
    Advised(advice=<Advice.TTL: 5>, value=3600000)
    """
    if not isinstance(seconds, (int, float)) or not 0 <= seconds * 1000 <= RANGE_END:
        raise Invalid(f"TTL({shown(seconds)}): give a number of seconds, at most ten years, or 0 for ever")
    return Advised(Advice.TTL, math.ceil(seconds * 1000))


def PRIORITY(n: int) -> Advised:  # noqa: N802 - as TTL
    """Advice: set the file's priority, from -100 to 100. The daemon moves files with a lower priority to disk first.

    A file without this advice has priority 0.

    >>> sym.PRIORITY(10)
    Advised(advice=<Advice.PRIORITY: 6>, value=10)
    """
    return Advised(Advice.PRIORITY, int64(n, "n"))


@system_call
def kv_advise(kv: KV | Path, *advice: Advised) -> Script[None]:
    """Give the daemon advice on a file: PIN, UNPIN, TTL(s), PRIORITY(n), COLD, WILLNEED.

    `kv`: an open file, or a path.

    TTL: the daemon removes the file, with all its names, when no program and no user of the mount has had it open for
    that many seconds. A pinned file stays.
    PIN: the pages of the file stay in memory. The daemon brings pages that are on disk into memory as soon as memory is
    free. PIN(seconds) is a lease, which ends after that time or with the daemon. The daemon's `pin_share` limits the
    pinned pages, to half of memory by default, and each user may pin half of that number. Beyond the limits, the call
    raises NoSpace or OverQuota.
    PRIORITY: among the files of one user, the daemon moves those with a lower priority to disk first.

    The daemon keeps TTL, PIN and PRIORITY with the file, not with a handle. Forks begin without advice. Only the owner
    may give this advice, and may change it at any time. `kv_stat` and `getfattr -d` show it, and
    `setfattr -n user.kv.ttl -v 3600` sets it from a shell.

    WILLNEED and COLD are hints: the call returns immediately. WILLNEED brings a file's pages into memory if they fit.
    The caller needs permission to read the file. COLD lets the daemon move the pages to disk as soon as no call
    computes with them. The next use of the file ends the advice COLD. Only the file's owner, root and writers of its
    group may give COLD (else NotPermitted). COLD has no effect on a pinned file. While other handles have the file
    open, COLD has an effect only if the owner gives it.

    >>> with sym.kv_create("advised.kv") as kv:
    ...     sym.kv_advise(kv, sym.TTL(3600), sym.PIN)
    ...     sym.kv_stat(kv).ttl_s, sym.kv_stat(kv).pinned
    (3600.0, True)
    >>> sym.kv_remove("advised.kv")
    """
    if not 1 <= len(advice) <= MAX_ADVICE:
        raise Invalid(
            f"kv_advise() takes 1 to {MAX_ADVICE} pieces of advice, as sym.PIN or sym.TTL(60), not {len(advice)}"
        )
    for each in advice:
        if not isinstance(each, Advised):
            raise Invalid(f"kv_advise() takes sym.PIN, sym.TTL(60) and the like, not {each!r}")
    pieces = b"".join(ADVISED_STRUCT.pack(each.advice, each.value) for each in advice)
    handle, path = (kv.handle, b"") if isinstance(kv, KV) else (0, path_bytes(kv))
    yield Call(Op.KV_ADVISE, handle=handle, args=(len(advice), 0, 0, 0), payload=pieces + path)
