"""The fields of requests, checked once, and replies as operations give them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from libsym.channel.server import Request
from libsym.errors import Invalid, SymError


@dataclass(frozen=True, slots=True)
class Reply:
    """What an operation answers when it did not fail."""

    args: tuple[int, ...] = ()
    payload: bytes = b""


def kept(error: SymError) -> SymError:
    """An error that outlives its handler, without the frames that led to it.

    With them it would be garbage that only the collector can take, rows and all; and where C has a buffer of a
    memoryview in that, CPython ends the process: it clears the view first.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def text_of(request: Request, begin: int = 0) -> str:
    """A path or a text. What is no UTF-8 in it stays what it was: a file's name is bytes; `encode` refuses it."""
    return request.payload[begin:].decode("utf-8", "surrogateescape")


def mode_of(request: Request) -> int:
    """The permission bits of a new file."""
    mode = request.args[0]
    if mode & ~0o7777:
        raise Invalid(f"mode {mode:#o} has more than permission bits")
    return mode


def json_of(request: Request, payload: bytes, *, max_texts: int, max_other_bytes: int) -> Any:
    """JSON with so many texts at most, names included, and so many bytes that are no text.

    Nothing else runs while it is parsed, and a value takes up to a microsecond: 0.3 s for a message full of `[],`.
    """
    plain = payload.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * max_texts or sum(map(len, plain.split(b'"')[::2])) > max_other_bytes:
        raise Invalid(
            f"{request.op.name} takes JSON of at most {max_texts} texts, names included, and {max_other_bytes} bytes "
            "that are no text"
        )
    try:
        return json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{request.op.name} takes JSON: {error}") from None


def json_reply(value: Any) -> Reply:
    return Reply((), json.dumps(value).encode())
