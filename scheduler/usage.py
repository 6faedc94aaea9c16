"""What a program has used: tokens and times, as the batch scheduler counts them, and its pages times seconds."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from kvfs.pages.table import PageTable
from libsym.channel.server import Request
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.replies import Reply

FILES_A_TURN = 500
"""Looked at before others get their turn: some 0.3 ms."""


@dataclass(slots=True)
class _Held:
    """A table that the program has open, with so many handles."""

    num_handles: int
    began: float
    """The table's own page-seconds when the first of them was opened."""


@dataclass(slots=True)
class PageSeconds:
    """Pages of the files that a program has or had open, times seconds. A file opened twice counts once.

    Files that share pages count them each: it is what having the files costs, not what the pool has room for.
    """

    _before: float = 0.0
    """Of tables that it has no longer."""
    _held: dict[PageTable, _Held] = field(default_factory=dict)

    def opened(self, table: PageTable) -> None:
        """One more handle on a table."""
        held = self._held.get(table)
        if held is None:
            self._held[table] = _Held(1, table.page_seconds)
        else:
            held.num_handles += 1

    def closed(self, table: PageTable) -> None:
        """One handle less."""
        held = self._held[table]
        held.num_handles -= 1
        if not held.num_handles:
            del self._held[table]
            self._before += table.page_seconds - held.began

    @property
    def num_tables(self) -> int:
        return len(self._held)

    def total(self) -> float:
        """Until now."""
        return self._before + sum(table.page_seconds - held.began for table, held in self._held.items())

    async def total_in_turns(self) -> float:
        """The same, of any number of files, without holding anybody up."""
        found = self._before
        for index, (table, held) in enumerate(list(self._held.items())):
            if index % FILES_A_TURN == FILES_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            found += table.page_seconds - held.began
        return found


class Program(Protocol):
    """What is asked of a LIP."""

    @property
    def pid(self) -> int: ...

    @property
    def page_seconds(self) -> PageSeconds: ...


class Accounting:
    """Answers GETRUSAGE: args[0] is the process's number, the payload the rest in JSON."""

    def __init__(self, batches: BatchScheduler) -> None:
        self._batches = batches

    def getrusage(self, lip: Program, _request: Request) -> Reply | Coroutine[Any, Any, Reply]:
        """At once, if the program has few files open."""
        if lip.page_seconds.num_tables > FILES_A_TURN:
            return self._in_turns(lip)
        return self._reply(lip, lip.page_seconds.total())

    async def _in_turns(self, lip: Program) -> Reply:
        return self._reply(lip, await lip.page_seconds.total_in_turns())

    def _reply(self, lip: Program, page_seconds: float) -> Reply:
        used = self._batches.usage_of(lip)
        facts = {
            "calls": used.num_calls,
            "failed_calls": used.num_failed_calls,
            "tokens": used.num_tokens,
            "rejected_tokens": used.num_rejected,
            "queue_s": used.queue_s,
            "compute_s": used.compute_s,
            "page_seconds": page_seconds,
        }
        return Reply((lip.pid,), json.dumps(facts).encode())
