"""A program's process as its launcher knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """A program's first process; `ended` gives its status as waitpid(2) does."""

    pid: int
    ended: asyncio.Future[int]
    first: int | None = None
    """Of its sandbox: who ends that process ends all that is inside."""
