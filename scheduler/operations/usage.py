"""GETRUSAGE: what a program has used: tokens and times, as the batch scheduler counts them, and page-seconds."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

from libsym.abi import Op
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.page_seconds import FILES_A_TURN
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.replies import Reply


class ResourceUsage:
    """Answers GETRUSAGE: args[0] is the process's number, the payload the rest in JSON."""

    def __init__(self, batches: BatchScheduler) -> None:
        self._batches = batches

    def table(self) -> Table:
        return {Op.GETRUSAGE: Operation(self._getrusage, takes_payload=False, max_waiting=MAX_LATER)}

    def _getrusage(self, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        """At once, if the program has few files open."""
        lip = call.lip
        if lip.page_seconds.num_tables > FILES_A_TURN:
            return self._in_turns(lip)
        return self._reply(lip, lip.page_seconds.total())

    async def _in_turns(self, lip: Lip) -> Reply:
        return self._reply(lip, await lip.page_seconds.total_in_turns())

    def _reply(self, lip: Lip, page_seconds: float) -> Reply:
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
