"""Who this program is to the daemon, and what it has used."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import Op
from libsym.channel.scripts import Call, Script
from libsym.faces import system_call
from libsym.info import split_known


@dataclass(frozen=True, slots=True)
class Usage:
    """What a connection has used so far.

    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> used = sym.getrusage()
    >>> used.calls, used.failed_calls, used.tokens
    (1, 0, 3)
    """

    calls: int = 0
    """Of `pred` and what else runs the model, answered."""
    failed_calls: int = 0
    tokens: int = 0
    """Computed, by calls that did not fail; of a generation that failed in the end, those of the steps before."""
    rejected_tokens: int = 0
    """Of these, the ones of drafts that turned out wrong: they are in no file."""
    queue_s: float = 0.0
    """Seconds that its calls waited for a step, summed."""
    compute_s: float = 0.0
    """Seconds of the steps that its calls were in, summed; others may have been in them, too."""
    page_seconds: float = 0.0
    """Pages of the files that it has or had open, times the seconds that it had them."""


@system_call
def getpid() -> Script[int]:
    """The number that the daemon knows this program by: what others `send` to.

    It is the process's number as the daemon sees it, which in a PID namespace is not what os.getpid() says; 0, where
    the daemon cannot see the process at all. A thread has its process's, a child by fork its own.

    >>> import os
    >>> sym.getpid() == os.getpid()
    True
    """
    reply = yield Call(Op.GETRUSAGE)
    return reply.args[0]


@system_call
def getrusage() -> Script[Usage]:
    """What this program's connection has used: calls, tokens, times, and pages times seconds.

    `.symphony/proc/PID/status` on the mount shows the same of every program.

    >>> before = sym.getrusage().tokens
    >>> with sym.kv_create() as kv:
    ...     length = sym.kv_write(kv, [1, 2, 3])
    >>> sym.getrusage().tokens - before
    3
    """
    reply = yield Call(Op.GETRUSAGE)
    return Usage(**split_known(Usage, reply.payload)[0])
