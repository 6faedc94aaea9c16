"""System calls as scripts: each is written once, for threads and for event loops.

A script is a generator that yields requests, is sent their replies, and returns what the call gives. It neither waits
nor knows who does: `ClientChannel.run` waits with the thread, `libsym.channel.event_loop.run` with the task.

    def length_script(kv: KV) -> Script[int]:
        reply = yield Call(Op.KV_STAT, handle=kv.handle)
        return parse(reply.payload)["tokens"]

An error reply is raised at the `yield`. So is what ends the wait, Ctrl-C or the cancellation of a task: a script may
clean up then, but must not yield again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

from libsym.abi import Op
from libsym.channel.reply import Reply

T = TypeVar("T")


class Call(NamedTuple):
    """One request. (A tuple: it is made for each call, and a frozen dataclass takes three times as long.)"""

    op: Op
    flags: int = 0
    handle: int = 0
    args: tuple[int, int, int, int] = (0, 0, 0, 0)
    payload: bytes = b""


Script = Generator[Call, Reply, T]
"""Yields calls, is sent their replies, returns a T."""
