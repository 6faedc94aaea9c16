"""Replies as operations give them, and errors that are kept until a reply takes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from libsym.errors import SymError


@dataclass(frozen=True, slots=True)
class Reply:
    """What an operation answers when it did not fail."""

    args: tuple[int, ...] = ()
    payload: bytes = b""
    num_rows: int = 0
    """Result slots that are the program's with it."""


def kept(error: SymError) -> SymError:
    """An error that outlives its handler, without the frames that led to it.

    With them it would be garbage that only the collector can take, rows and all; and where C has a buffer of a
    memoryview in that, CPython ends the process: it clears the view first.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def json_reply(value: Any) -> Reply:
    return Reply((), json.dumps(value).encode())
