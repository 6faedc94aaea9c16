"""Calls about the daemon and its model."""

from __future__ import annotations

from typing import Any

from libsym.abi import Op
from libsym.calls.faces import system_call
from libsym.calls.info import ModelInfo, parse
from libsym.channel.scripts import Call, Script


@system_call
def model_info() -> Script[ModelInfo]:
    """Return facts about the model that the daemon serves.

    >>> sym.model_info().vocab_size
    259
    """
    reply = yield Call(Op.MODEL_INFO)
    return ModelInfo.from_json(reply.payload)


@system_call
def daemon_stat() -> Script[dict[str, Any]]:
    """Return the state of the daemon in numbers, as `symphony stat` shows them.

    `users` has the figures of the caller's user. Root and the daemon's user get the figures of every user.

    >>> sym.daemon_stat()["model"]
    'tiny'
    """
    return (yield from _object(Op.STAT))


@system_call
def daemon_check() -> Script[dict[str, int]]:
    """Let the daemon check its page accounting, and return the figures.

    Free and referenced pages must add up to all pages, and each reference must have a holder. Otherwise the call fails
    with EIO, and the message says where. Only root and the daemon's own user may do this.

    >>> books = sym.daemon_check()
    >>> books["num_free_pages"] + books["num_referenced_pages"] == books["num_pages"]
    True
    """
    return (yield from _object(Op.CHECK))


def _object(op: Op) -> Script[dict[str, Any]]:
    reply = yield Call(op)
    found: dict[str, Any] = parse(reply.payload)
    return found
