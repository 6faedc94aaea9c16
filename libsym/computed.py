"""Files that are opened, or computed by exactly one of the programs that want them: whole, or not there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from numbers import Integral
from typing import Literal

from libsym.abi import ANY_OWNER, Op
from libsym.arguments import Path, int32, path_bytes, path_text, permissions, shown
from libsym.channel.process import process
from libsym.channel.scripts import Call, Script
from libsym.errors import Exists, Invalid
from libsym.kv import KV, Flags, checked_flags, opened
from libsym.open_file import length_script

Compute = Iterable[int] | Callable[[KV], object]
"""Tokens that a file is to have, or a function that fills it."""
Owner = int | Literal["any"] | None
"""Users whose files are taken beside the caller's own and root's: one uid, or all."""
_NO_UID = (1 << 32) - 1
"""A number that chown(2) takes for "leave it"."""


def kv_open_or_compute(
    path: Path, compute: Compute, flags: Flags = "r", *, mode: int = 0o600, owner: Owner = None
) -> KV:
    """Opens a KV file, or computes it if there is none: once, however many programs and threads ask for it.

    `compute`: the tokens that it is to have, or a function that is given the empty file, without a name yet, and fills
    it. The name appears in one step when that has returned, so nobody ever sees half a file. The others wait, and then
    open it. Whoever fails, is killed or interrupted leaves nothing, and the next one computes. A file that has the name
    already is opened as it is, an empty one too. A function that leaves its file empty, or closes it, gets Invalid.

    The file has to be the caller's or root's: what another user has put there is NoAccess. `owner` admits a user's
    files by the uid, or "any" user's, as those of a team that trusts each other. Others' claims are waited for then,
    for half a minute at most; without `owner` the programs of one user wait for each other alone.

    >>> with sym.kv_open_or_compute("prefix.kv", sym.tokenize("Be brief.")) as kv:
    ...     kv.len()
    9
    >>> sym.kv_open_or_compute("prefix.kv", lambda kv: print("never called")).len()
    9
    """
    channel = process.channel()
    tokens = () if callable(compute) else int32(compute, "token")
    while True:
        kv, is_there = channel.run(claim_script(path, flags, mode, owner))
        if is_there:
            return kv
        try:
            if callable(compute):
                refuse_coroutine(compute(kv))
            else:
                kv.write(tokens)
            if channel.run(name_script(kv, path, flags)):
                return kv
        finally:
            if kv.path is None:
                kv.close()


def refuse_coroutine(result: object) -> None:
    if isinstance(result, Coroutine):
        result.close()
        raise Invalid("compute is a coroutine function, which nobody awaits here: sym.aio.kv_open_or_compute() does")


def claim_script(path: Path, flags: Flags, mode: int, owner: Owner) -> Script[tuple[KV, bool]]:
    """The file, if it is there; else an empty one without a name, which nobody else is given as long as it is open."""
    name, write = path_text(path), checked_flags(flags)
    args = (permissions(mode), _admitted(owner), 0, 0)
    reply = yield Call(Op.KV_CLAIM, flags=write, args=args, payload=path_bytes(name))
    is_there = reply.args[3] != 0  # it was found in a directory
    kv = opened(reply, name if is_there else None, writable=bool(write) or not is_there)
    return kv, is_there


def name_script(kv: KV, path: Path, flags: Flags) -> Script[bool]:
    """Gives a claimed file its name. False: somebody has made a file of that name without asking.

    Invalid: it was closed or left empty. A name would keep that for ever.
    """
    write = checked_flags(flags)
    if kv.closed:
        raise Invalid(f"compute closed the file that was to be {path_text(path)}: it has to leave it open")
    if not (yield from length_script(kv)):
        raise Invalid(
            f"compute left the file that was to be {path_text(path)} empty: kv_write() to the KV that it is given "
            "(what it returns is not looked at)"
        )
    try:
        reply = yield Call(Op.KV_NAME, flags=write, handle=kv.handle)
    except Exists:
        return False
    kv.named(path_text(path), reply.args[2], reply.args[3])
    kv.writable = bool(write)
    return True


def _admitted(owner: object) -> int:
    """Return the number for the wire. Root's files are always taken, so 0 stands for no other user."""
    if owner is None:
        return 0
    if owner == "any":
        return ANY_OWNER
    if isinstance(owner, bool) or not isinstance(owner, Integral) or not 0 <= int(owner) < _NO_UID:
        raise Invalid(f"owner={shown(owner)}: give a uid as a whole number, or 'any'")
    return int(owner)
