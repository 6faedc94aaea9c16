"""System calls as scripts: each call is written once, for threads and for event loops.

A script is a generator that yields requests, receives their replies, and returns the result of the call. The script
does not wait itself: in `ClientChannel.run` a thread waits, and in `libsym.channel.event_loop.run` a task waits.

    def length_script(kv: KV) -> Script[int]:
        reply = yield Call(Op.KV_STAT, handle=kv.handle)
        return parse(reply.payload)["tokens"]

An error reply is raised at the `yield`. Ctrl-C and the cancellation of a task are raised there, too; after these the
script may clean up, but must not yield again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

from libsym.abi import Op
from libsym.channel.reply import Reply

T = TypeVar("T")


class Call(NamedTuple):
    """A request of a script. The class is a tuple, because a frozen dataclass takes three times as long to make."""

    op: Op
    flags: int = 0
    handle: int = 0
    args: tuple[int, int, int, int] = (0, 0, 0, 0)
    payload: bytes = b""


Script = Generator[Call, Reply, T]
"""Generator that yields calls, receives their replies, and returns a T."""
