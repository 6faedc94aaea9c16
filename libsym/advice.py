"""What a program says about the future of its files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libsym.abi import ADVISED_STRUCT, MAX_ADVICE, RANGE_END, Advice, Op
from libsym.arguments import Path, int64, path_bytes, shown
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid
from libsym.faces import system_call
from libsym.kv import KV
from libsym.open_file import channel_of


@dataclass(frozen=True, slots=True)
class Advised:
    """One piece of advice, for `kv_advise`.

    >>> sym.TTL(60) == sym.TTL(60), sym.PIN == sym.UNPIN
    (True, False)
    """

    advice: Advice
    value: int = 0


@dataclass(frozen=True, slots=True)
class Pinning(Advised):
    """PIN: by itself for good, called with a number of seconds for so long.

    >>> sym.PIN
    Pinning(advice=<Advice.PIN: 1>, value=0)
    """

    def __call__(self, seconds: float) -> Advised:
        """A lease.

        >>> sym.PIN(60)
        Pinning(advice=<Advice.PIN: 1>, value=60000)
        """
        if not isinstance(seconds, (int, float)) or not 0 < seconds * 1000 <= RANGE_END:
            raise Invalid(f"PIN({shown(seconds)}): give a number of seconds above 0, at most ten years")
        return Pinning(Advice.PIN, math.ceil(seconds * 1000))


PIN = Pinning(Advice.PIN)
"""Advice: keep the file, whatever its TTL, and its pages in memory; `PIN(seconds)`: for so long."""
UNPIN = Advised(Advice.UNPIN)
"""Advice: it is like any other file again."""
COLD = Advised(Advice.COLD)
"""Advice: it will not be used soon: its pages may go to disk."""
WILLNEED = Advised(Advice.WILLNEED)
"""Advice: it will be used soon: its pages are brought into memory where there is room for them."""


def TTL(seconds: float) -> Advised:  # noqa: N802 - advice is in capitals, as in madvise(2)
    """Advice: remove the file so many seconds after its last use, once nobody has it open. 0: never.

    >>> sym.TTL(3600)
    Advised(advice=<Advice.TTL: 5>, value=3600000)
    """
    if not isinstance(seconds, (int, float)) or not 0 <= seconds * 1000 <= RANGE_END:
        raise Invalid(f"TTL({shown(seconds)}): give a number of seconds, at most ten years, or 0 for ever")
    return Advised(Advice.TTL, math.ceil(seconds * 1000))


def PRIORITY(n: int) -> Advised:  # noqa: N802 - as TTL
    """Advice: what has a lower number, from -100 to 100, goes to disk before what has a higher one; 0 at first.

    >>> sym.PRIORITY(10)
    Advised(advice=<Advice.PRIORITY: 6>, value=10)
    """
    return Advised(Advice.PRIORITY, int64(n, "n"))


@system_call
def kv_advise(kv: KV | Path, *advice: Advised) -> Script[None]:
    """Says what is to become of a file, by its path or an open one: PIN, UNPIN, TTL(s), PRIORITY(n), COLD, WILLNEED.

    A file with a TTL is removed, with all its names, so many seconds after its last use: when nobody (no program,
    nobody on the mount) has had it open for so long, and it is not pinned. The pages of a pinned file stay in memory,
    and come there as soon as there is room. PIN(seconds) is a lease: it ends by itself, and with the daemon.
    So many pages may be pinned at once as `pin_share` of the daemon says, half of memory, and by each user half of
    that: more is NoSpace or OverQuota. Of a user's files those with a lower PRIORITY go to disk first.

    This advice is kept with the file, not with a handle; forks begin without any. Only the owner gives it, and may
    change it at any time; `kv_stat` and `getfattr -d` show it, `setfattr -n user.kv.ttl -v 3600` sets it from a shell.

    WILLNEED brings a file's pages into memory if there is room, COLD lets them go to disk as soon as nothing computes
    with them, until its next use. Both return at once, and are only hints. WILLNEED takes the permission to read the
    file. COLD is for its owner, root, and writers of its group (else NotPermitted). It does nothing to a file that is
    pinned, and nothing, unless the owner gives it, while others have it open.

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


@system_call
def kv_sync(kv: KV | None = None) -> Script[None]:
    """Returns when the file would survive a crash of the daemon and a power cut, as fsync(2); without one, everything.

    The file is kept as the calls before this one left it: all its entries, its names, owner, modes, times, attributes
    and advice. It waits for no other file's bytes, unless a name of this one was taken from a file that is not kept
    yet. NoSpace: the disk is full. An anonymous file can't be kept (NotSupported): it goes with its last handle.
    After any error the file is as it was, in memory, and the next call tries again.

    >>> with sym.kv_create("kept.kv") as kv:
    ...     length = sym.kv_write(kv, [1, 2, 3])
    ...     sym.kv_sync(kv)
    >>> sym.kv_sync()
    >>> sym.kv_remove("kept.kv")
    """
    if kv is not None:
        channel_of(kv, "kv_sync")
    yield Call(Op.KV_SYNC, handle=0 if kv is None else kv.handle)
