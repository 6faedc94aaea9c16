"""Ending of programs: signals to all processes of a program, and the status and reason of its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from symphony.launcher.common.statuses import (
    OUT_OF_MEMORY,
    OUT_OF_PAGES,
    OUT_OF_TIME,
    OUT_OF_TOKENS,
    SIGNALLED,
    TOO_MANY_PROCESSES,
)
from symphony.launcher.machine import processes
from symphony.launcher.supervising.program import End, LaunchedProgram

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
LAST_WORDS_S = 0.2
"""Time for a program to report that a call failed at its limit, for instance with a traceback."""
LIMIT_STATUS = {
    "memory": OUT_OF_MEMORY,
    "tokens": OUT_OF_TOKENS,
    "pages": OUT_OF_PAGES,
    "page_seconds": OUT_OF_PAGES,
    "processes": TOO_MANY_PROCESSES,
    "time": OUT_OF_TIME,
}
"""Exit status of a program that exceeded a limit."""
_WORDS = {
    "memory": "used more bytes of memory than its limit",
    "tokens": "asked for more tokens than its limit",
    "pages": "asked for more pages than its limit",
    "page_seconds": "held pages for more page-seconds than its limit",
    "processes": "had more processes than its limit",
    "time": "ran for more seconds than its limit",
}

_DEFAULT = "the default (half of the machine's; --memory sets another)"


def members(program: LaunchedProgram) -> list[int]:
    """Return the processes of a program. All of them descend from the program's own process, which adopts orphans.
    In a sandbox, they descend from its first process, which adopts orphans and is not counted.
    """
    if program.process is None:
        return []
    first = program.process.first
    return processes.descendants([program.process.pid] if first is None else processes.children(first))


async def end(program: LaunchedProgram, last_words_s: float = 0.0) -> None:
    """End all processes of a program, by SIGTERM, and after GRACE_S by SIGKILL.

    `last_words_s`: time in which the program may end by itself first.
    """
    program.stopping.set()
    if last_words_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(program.over.wait(), last_words_s)
    for number in (signal.SIGTERM, signal.SIGCONT):
        for pid in members(program):
            processes.send_signal(pid, number)
    try:
        await asyncio.wait_for(program.over.wait(), GRACE_S)
    except TimeoutError:
        kill_now(program)


def kill_now(program: LaunchedProgram) -> None:
    """Kill a program by SIGKILL. When a sandbox's first process dies, the kernel kills all processes in the sandbox."""
    first = program.process.first if program.process is not None else None
    for pid in members(program) if first is None else [first]:
        processes.send_signal(pid, signal.SIGKILL)


def may_start_again(program: LaunchedProgram, end: End) -> bool:
    """Return whether to restart a program: it failed by itself, has retries left, and is not being ended."""
    failed = end.reason == "signal" or (end.reason == "exit" and end.status != 0)
    return failed and program.record.restarts < program.spec.restart.retries and not program.stopping.is_set()


def judge(program: LaunchedProgram, wait_status: int) -> End:
    """Return the End of a program, from the wait status of its process.
    If the program ran out of memory, `program.limit` is set.
    """
    code = os.waitstatus_to_exitcode(wait_status)
    if _ran_out_of_memory(program, code):
        program.limit = program.limit or "memory"
    if program.limit is not None:
        return End(LIMIT_STATUS[program.limit], _reason(program.limit), time.time())
    if code >= 0:
        return End(code, "exit", time.time())
    return End(SIGNALLED - code, "killed" if program.stopping.is_set() else "signal", time.time())


def _ran_out_of_memory(program: LaunchedProgram, code: int) -> bool:
    if code == OUT_OF_MEMORY and program.spec.limits.memory is not None:
        return True
    return code != 0 and program.group is not None and program.group.ran_out_of_memory()


def told(program: LaunchedProgram) -> str:
    """Return a line for the user on the limit that the program exceeded."""
    assert program.limit is not None
    limit = getattr(program.spec.limits, program.limit)
    if program.limit == "memory" and limit is None:
        return f"{program.record.name} {_WORDS['memory']} of {program.spec.memory:,}, {_DEFAULT}, and was ended"
    return f"{program.record.name} {_WORDS[program.limit]} of {_shown(limit)}, and was ended"


def _shown(limit: float | None) -> str:
    return "its user" if limit is None else f"{limit:,}"


def _reason(limit: str) -> str:
    """Return the reason of an end at a limit. For page-seconds, the reason is "pages"."""
    return "pages" if limit == "page_seconds" else limit
