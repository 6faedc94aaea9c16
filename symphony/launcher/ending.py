"""How programs are ended, what their end means, and which processes are a program's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from symphony.launcher import processes
from symphony.launcher.program import End, Program
from symphony.launcher.statuses import (
    OUT_OF_MEMORY,
    OUT_OF_PAGES,
    OUT_OF_TIME,
    OUT_OF_TOKENS,
    SIGNALLED,
    TOO_MANY_PROCESSES,
)

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
LAST_WORDS_S = 0.2
"""For a program whose call has failed by its limit: it may say so, with a traceback for instance."""
LIMIT_STATUS = {
    "memory": OUT_OF_MEMORY,
    "tokens": OUT_OF_TOKENS,
    "pages": OUT_OF_PAGES,
    "page_seconds": OUT_OF_PAGES,
    "processes": TOO_MANY_PROCESSES,
    "time": OUT_OF_TIME,
}
"""What a program ends with that ran into a limit."""
_WORDS = {
    "memory": "used more bytes of memory than its limit",
    "tokens": "asked for more tokens than its limit",
    "pages": "asked for more pages than its limit",
    "page_seconds": "held pages for more page-seconds than its limit",
    "processes": "had more processes than its limit",
    "time": "ran for more seconds than its limit",
}

_DEFAULT = "the default (half of the machine's; --memory sets another)"


def members(program: Program) -> list[int]:
    """The processes of a program. Its first one adopts orphans, or that of its sandbox: all others descend from it."""
    if program.process is None:
        return []
    first = program.process.first
    return processes.descendants([program.process.pid] if first is None else processes.children(first))


async def end(program: Program, last_words_s: float = 0.0) -> None:
    """Ends all of a program's processes: by SIGTERM, and by SIGKILL where that is not enough. `last_words_s`: it may
    end by itself for so long.
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


def kill_now(program: Program) -> None:
    """By SIGKILL. The kernel ends all of a sandbox with its first process, however many there are."""
    first = program.process.first if program.process is not None else None
    for pid in members(program) if first is None else [first]:
        processes.send_signal(pid, signal.SIGKILL)


def may_start_again(program: Program, end: End) -> bool:
    """It failed by itself, its policy is to start again, and nobody wants its end."""
    failed = end.reason == "signal" or (end.reason == "exit" and end.status != 0)
    return failed and program.record.restarts < program.spec.restart.retries and not program.stopping.is_set()


def judge(program: Program, wait_status: int) -> End:
    """What the end of a program's process means."""
    code = os.waitstatus_to_exitcode(wait_status)
    if _ran_out_of_memory(program, code):
        program.limit = program.limit or "memory"
    if program.limit is not None:
        return End(LIMIT_STATUS[program.limit], _reason(program.limit), time.time())
    if code >= 0:
        return End(code, "exit", time.time())
    return End(SIGNALLED - code, "killed" if program.stopping.is_set() else "signal", time.time())


def _ran_out_of_memory(program: Program, code: int) -> bool:
    if code == OUT_OF_MEMORY and program.spec.limits.memory is not None:
        return True
    return code != 0 and program.group is not None and program.group.ran_out_of_memory()


def told(program: Program) -> str:
    """The line about a program that ran into a limit."""
    assert program.limit is not None
    limit = getattr(program.spec.limits, program.limit)
    if program.limit == "memory" and limit is None:
        return f"{program.record.name} {_WORDS['memory']} of {program.spec.memory:,}, {_DEFAULT}, and was ended"
    return f"{program.record.name} {_WORDS[program.limit]} of {_shown(limit)}, and was ended"


def _shown(limit: float | None) -> str:
    return "its user" if limit is None else f"{limit:,}"


def _reason(limit: str) -> str:
    """Page-seconds are a limit on pages, too."""
    return "pages" if limit == "page_seconds" else limit
