"""kv_open_or_compute: one caller computes a missing file, and all callers open it when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from numbers import Integral
from typing import Literal

from libsym.abi import ANY_OWNER, Op
from libsym.arguments import Path, int32, path_bytes, path_text, permissions, shown
from libsym.calls.kv import KV, Flags, checked_flags, opened
from libsym.calls.open_file import length_script
from libsym.channel.process import process
from libsym.channel.scripts import Call, Script
from libsym.errors import Exists, Invalid

Compute = Iterable[int] | Callable[[KV], object]
"""Content of a new file: its tokens, or a function that fills it."""
Owner = int | Literal["any"] | None
"""Further users whose files the call may open: a uid, "any" for all users, or None. Files of the caller and of root are
always allowed.
"""
_NO_UID = (1 << 32) - 1
"""A uid that belongs to no user. In chown(2), this number means "leave the owner unchanged"."""


def kv_open_or_compute(
    path: Path, compute: Compute, flags: Flags = "r", *, mode: int = 0o600, owner: Owner = None
) -> KV:
    """Open a KV file, or compute it if it is missing. Exactly one of all callers computes the file; the other callers
    wait.

    `compute`: the tokens of the file, or a function that gets an empty file without a name and fills it. When the
    function returns, the name appears in one step, so no program sees half a file. Then the waiting callers open the
    file. If a caller fails or is killed or interrupted, it leaves no file, and the next caller computes the file. If
    the name exists already, the call opens that file, even if it is empty. Invalid: the function left its file empty,
    or closed it.

    The file has to belong to the caller or to root: another user's file is NoAccess. `owner` admits the files of one
    more uid, or of all users ("any"), for a team whose members trust each other. Without `owner`, the call waits only
    for programs of the same user. With `owner`, it also waits for programs of other users, for half a minute at most.

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
    """Return the file, and whether it exists already.

    If the name is missing, the file is empty and has no name yet. While that file is open, it holds the claim to the
    name.
    """
    name, write = path_text(path), checked_flags(flags)
    args = (permissions(mode), _admitted(owner), 0, 0)
    reply = yield Call(Op.KV_CLAIM, flags=write, args=args, payload=path_bytes(name))
    is_there = reply.args[3] != 0  # the file is in a directory, so it has a name
    kv = opened(reply, name if is_there else None, writable=bool(write) or not is_there)
    return kv, is_there


def name_script(kv: KV, path: Path, flags: Flags) -> Script[bool]:
    """Give a claimed file its name. False: another program has made a file of that name without a claim.

    Invalid: `compute` has closed the file, or left it empty. An empty file with the name would stay for ever.
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
    """Return the uid for the request. 0 admits no further user, because root's files are always admitted."""
    if owner is None:
        return 0
    if owner == "any":
        return ANY_OWNER
    if isinstance(owner, bool) or not isinstance(owner, Integral) or not 0 <= int(owner) < _NO_UID:
        raise Invalid(f"owner={shown(owner)}: give a uid as a whole number, or 'any'")
    return int(owner)
