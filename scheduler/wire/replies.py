"""Replies of operations, and errors that are kept for a later reply."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from libsym.errors import SymError


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of an operation that has succeeded."""

    args: tuple[int, ...] = ()
    payload: bytes = b""
    num_rows: int = 0
    """Number of result slots that pass to the program with this reply."""


def kept(error: SymError) -> SymError:
    """Return an error without its traceback, so that it can outlive its handler.

    The traceback's frames would make the error part of a reference cycle that also holds rows. Only the garbage
    collector can free such a cycle. If C code still uses the buffer of a memoryview in such a cycle, CPython ends the
    process, because the collector clears the view.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def json_reply(value: Any) -> Reply:
    return Reply((), json.dumps(value).encode())
