"""The calling program's pid as the daemon sees it, and its usage."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import Op
from libsym.calls.faces import system_call
from libsym.calls.info import split_known
from libsym.channel.scripts import Call, Script


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a program so far, over all its connections.

    >>> before = sym.getrusage()
    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> used = sym.getrusage()
    >>> used.calls - before.calls, used.failed_calls - before.failed_calls, used.tokens - before.tokens
    (1, 0, 3)
    """

    calls: int = 0
    """Calls that run the model, such as `pred`, whether they were answered, failed or were cancelled."""
    failed_calls: int = 0
    tokens: int = 0
    """Tokens that the daemon computed, also for calls that later failed or were cancelled."""
    rejected_tokens: int = 0
    """Part of `tokens`: rejected tokens of drafts. No file has them."""
    tokens_in: int = 0
    """Tokens that successful calls gave to the model: prompts, and tokens that the program drew itself."""
    tokens_out: int = 0
    """Number of results of successful calls: tokens of `generate`, and rows of logits, from each of which a token can
    be drawn.
    """
    steps: int = 0
    """Number of steps that computed the program's calls. A step with two of these calls counts twice."""
    queue_s: float = 0.0
    """Sum of the seconds that the program's calls waited for a step."""
    compute_s: float = 0.0
    """Sum of the seconds of the steps that computed the program's calls. Calls of other programs may have shared these
    steps.
    """
    page_seconds: float = 0.0
    """Number of pages of the program's open files, times the seconds that the files were open."""
    bytes_in: int = 0
    """Bytes of the program's requests."""
    bytes_out: int = 0
    """Bytes of the replies to the program's requests. Rows of logits are not counted: they lie elsewhere in the shared
    region.
    """


@system_call
def getpid() -> Script[int]:
    """Return this program's pid as the daemon sees it. Other programs `send` to this pid.

    In a PID namespace this pid differs from os.getpid(). The result is 0 if the daemon cannot see the process. All
    threads of a process have one pid; a child made by fork has its own.

    >>> import os
    >>> sym.getpid() == os.getpid()
    True
    """
    reply = yield Call(Op.GETRUSAGE)
    return reply.args[0]


@system_call
def getrusage() -> Script[Usage]:
    """Return this program's usage: calls, tokens, times, and pages times seconds.

    For a program that `symphony run` started, this is the usage of all its processes. For a process that connected by
    itself, this is its usage since its first connection. `.symphony/proc/PID/status` on the mount shows the same facts
    for each program.

    >>> before = sym.getrusage().tokens
    >>> with sym.kv_create() as kv:
    ...     length = sym.kv_write(kv, [1, 2, 3])
    >>> sym.getrusage().tokens - before
    3
    """
    reply = yield Call(Op.GETRUSAGE)
    return Usage(**split_known(Usage, reply.payload)[0])
