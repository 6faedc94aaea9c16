"""Handlers of operations. A module of this room has a table of its own, and `registry.py` all of them.

An operation never awaits, so it is atomic with respect to every other program and to the mount. What takes longer (long
texts, long directories, files made of others) or has to wait (locks) is left to a coroutine, which ends with the
program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from libsym.abi import Op
from libsym.errors import NotPermitted
from scheduler.connection.system_call import SystemCall
from scheduler.replies import Reply

Outcome: TypeAlias = "Reply | Coroutine[Any, Any, Reply | None] | None"
"""The answer, or a coroutine that gives it. None, of either: the operation sees to the answer itself."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The handler of one kind of call, and what is checked before it begins."""

    begin: Callable[[SystemCall], Outcome]
    takes_payload: bool = True
    """No: it has no use for one; some of those wait, and would keep it."""
    max_waiting: int | None = None
    """Waiting calls of the program at which the operation, which may leave its rest to a coroutine, is refused."""
    is_of_its_file: bool = False
    """A call looks at the file of its handle, and at nothing else that grows by what is computed."""
    opens: bool = False
    """The operation's answer is a handle, which the user has to have room for."""


Table: TypeAlias = Mapping[Op, Operation]


def require_operator(call: SystemCall, what: str) -> None:
    """NotPermitted: the caller does not run the daemon."""
    uid = call.lip.credentials.uid
    if uid not in {0, os.geteuid()}:
        raise NotPermitted(f"only root and the daemon's user may {what}, not uid {uid}")
