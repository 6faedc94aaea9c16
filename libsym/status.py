"""Calls about the daemon and its model."""

from __future__ import annotations

from typing import Any

from libsym.abi import Op
from libsym.channel.scripts import Call, Script
from libsym.faces import system_call
from libsym.info import ModelInfo, parse


@system_call
def model_info() -> Script[ModelInfo]:
    """The model that the daemon serves.

    >>> sym.model_info().vocab_size
    259
    """
    reply = yield Call(Op.MODEL_INFO)
    return ModelInfo.from_json(reply.payload)


@system_call
def daemon_stat() -> Script[dict[str, Any]]:
    """The state of the daemon in numbers: what `symphony stat` shows.

    `users` says what the caller's user makes the daemon keep; for root and the daemon's user what each user does.

    >>> sym.daemon_stat()["model"]
    'tiny'
    """
    return (yield from _object(Op.STAT))


@system_call
def daemon_check() -> Script[dict[str, int]]:
    """Has the daemon count its pages: free + referenced = all, and every reference has its holder; the figures.

    For root and the daemon's own user. Books that do not balance are an error (EIO) that says where.

    >>> books = sym.daemon_check()
    >>> books["num_free_pages"] + books["num_referenced_pages"] == books["num_pages"]
    True
    """
    return (yield from _object(Op.CHECK))


def _object(op: Op) -> Script[dict[str, Any]]:
    reply = yield Call(op)
    found: dict[str, Any] = parse(reply.payload)
    return found
