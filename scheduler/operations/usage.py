"""GETRUSAGE: the usage of a program by all its connections: tokens, times and pages."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

from libsym.abi import Op
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.programs.page_seconds import FILES_A_TURN
from scheduler.wire.replies import Reply


class ResourceUsage:
    """Answers GETRUSAGE. In the reply, args[0] is the pid, and the payload has the usage in JSON."""

    def table(self) -> Table:
        return {Op.GETRUSAGE: Operation(self._getrusage, takes_payload=False, max_waiting=MAX_LATER)}

    def _getrusage(self, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        """Return the program's usage. If the program has many files open, a coroutine counts the pages in slices."""
        lip = call.lip
        if lip.program.page_seconds.num_tables > FILES_A_TURN:
            return self._in_slices(lip)
        return self._reply(lip, lip.program.page_seconds.total())

    async def _in_slices(self, lip: Lip) -> Reply:
        return self._reply(lip, await lip.program.page_seconds.total_in_slices())

    @staticmethod
    def _reply(lip: Lip, page_seconds: float) -> Reply:
        return Reply((lip.pid,), json.dumps(lip.program.measure(page_seconds).facts()).encode())
