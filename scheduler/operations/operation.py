"""Handlers of operations. Each module of this room has a table of operations, and `registry.py` joins the tables.

An operation never awaits, so it is atomic for all other programs and for the mount. Work that takes long (long texts,
long directories, files made of other files) or must wait (locks) is left to a coroutine. The end of the program ends
the coroutine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from libsym.abi import Op
from libsym.errors import NotPermitted
from scheduler.connection.system_call import SystemCall
from scheduler.wire.replies import Reply

Outcome: TypeAlias = "Reply | Coroutine[Any, Any, Reply | None] | None"
"""The answer, or a coroutine that returns the answer. None, also from a coroutine: the operation answers the call
itself.
"""


@dataclass(frozen=True, slots=True)
class Operation:
    """The handler of one kind of call, and the checks before it begins."""

    begin: Callable[[SystemCall], Outcome]
    takes_payload: bool = True
    """Whether the operation uses a payload. Otherwise a payload is refused: a waiting call would keep the payload's
    memory.
    """
    max_waiting: int | None = None
    """Maximum number of waiting calls of the program. Another call that may wait is refused. None: no check."""
    is_of_its_file: bool = False
    """Whether the call reads at most one file that the run may be extending: the file of its handle."""
    commits_itself: bool = False
    """Whether the operation itself commits what the run has computed, if it reads any of that."""
    opens: bool = False
    """Whether the answer is a new handle. The gate then checks the user's limit on handles."""


Table: TypeAlias = Mapping[Op, Operation]


def require_operator(call: SystemCall, what: str) -> None:
    """Raise NotPermitted unless the caller is root or the daemon's user. A domain confines both of them, too."""
    uid = call.lip.credentials.uid
    if call.lip.credentials.root is not None:
        raise NotPermitted(f"a connection that is confined to a domain may not {what}")
    if uid not in {0, os.geteuid()}:
        raise NotPermitted(f"only root and the daemon's user may {what}, not uid {uid}")
