"""Process: a launcher's facts about a program's process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramProcess:
    """A program's own process. `ended` becomes its status, as in waitpid(2)."""

    pid: int
    ended: asyncio.Future[int]
    first: int | None = None
    """Pid of the sandbox's first process. If it ends, all processes inside end. None: there is no sandbox."""
