"""Who this program is to the daemon, and what it has used."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import Op
from libsym.channel.scripts import Call, Script
from libsym.faces import system_call
from libsym.info import split_known


@dataclass(frozen=True, slots=True)
class Usage:
    """What a program has used so far, by all its connections.

    >>> before = sym.getrusage()
    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> used = sym.getrusage()
    >>> used.calls - before.calls, used.failed_calls - before.failed_calls, used.tokens - before.tokens
    (1, 0, 3)
    """

    calls: int = 0
    """Of `pred` and what else runs the model, answered or given up."""
    failed_calls: int = 0
    tokens: int = 0
    """Computed, whatever became of them: also for calls that failed afterwards or were given up."""
    rejected_tokens: int = 0
    """Of these, the ones of drafts that turned out wrong: they are in no file."""
    tokens_in: int = 0
    """That calls gave which did not fail: a prompt, what was drawn from the row before."""
    tokens_out: int = 0
    """That they were answered with: tokens of `generate`, and rows, each of which a token could be drawn from."""
    steps: int = 0
    """That its calls were in; a step that holds two of them counts twice."""
    queue_s: float = 0.0
    """Seconds that its calls waited for a step, summed."""
    compute_s: float = 0.0
    """Seconds of the steps that its calls were in, summed; others may have been in them, too."""
    page_seconds: float = 0.0
    """Pages of the files that it has or had open, times the seconds that it had them."""
    bytes_in: int = 0
    """Of its requests. Rows of logits lie elsewhere in the shared region, and are not counted."""
    bytes_out: int = 0
    """Of their replies."""


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
    """What this program has used: calls, tokens, times, and pages times seconds.

    Of a program that `symphony run` started that is what all its processes have used together. Of a process that
    connected by itself it is what it has used since it connected first.
    `.symphony/proc/PID/status` on the mount shows the same of every program.

    >>> before = sym.getrusage().tokens
    >>> with sym.kv_create() as kv:
    ...     length = sym.kv_write(kv, [1, 2, 3])
    >>> sym.getrusage().tokens - before
    3
    """
    reply = yield Call(Op.GETRUSAGE)
    return Usage(**split_known(Usage, reply.payload)[0])
