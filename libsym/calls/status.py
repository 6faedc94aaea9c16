"""Calls about the daemon and its model."""

from __future__ import annotations

import json
from typing import Any

from libsym.abi import FLEET_BEGIN, Op
from libsym.arguments import Path, model_name, path_text
from libsym.calls.faces import system_call
from libsym.calls.info import ModelInfo, parse
from libsym.channel.scripts import Call, Script


@system_call
def model_info(model: str | None = None) -> Script[ModelInfo]:
    """Return facts about a model that the daemon serves. None: the model of the connection.

    >>> sym.model_info().vocab_size, sym.model_info("tiny").name
    (259, 'tiny')
    """
    reply = yield Call(Op.MODEL_INFO, payload=b"" if model is None else model_name(model))
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


@system_call
def fleet_place(*paths: Path, begins: bool = False) -> Script[dict[str, Any]]:
    """Return the machine of the fleet on which a program with these files should run: its name, and why.

    The files' pages should be there, and the machine should have little load. `symphony fleet place` shows the result.
    `begins`: a program will begin there, so the daemon counts it as load in later choices, until the machine shows it.

    >>> sym.fleet_place()
    Traceback (most recent call last):
      ...
    libsym.errors.NotFound: this daemon is in no fleet: see `etcd` in symphony.toml(5)
    """
    payload = json.dumps([path_text(path) for path in paths]).encode()
    return (yield from _object(Op.FLEET_PLACE, FLEET_BEGIN if begins else 0, payload))


@system_call
def fleet_machines(change: str = "", machine: str = "") -> Script[dict[str, Any]]:
    """Return the machines of the fleet, and what each of them holds. `symphony fleet status` shows the result.

    `change`: first change the state of `machine`, which is by default the machine of the daemon: `drain`, `return`,
    `leave`, or `lose`, which is a `leave` that loses files. Only root and the daemon's own user may do this.

    >>> sym.fleet_machines()
    Traceback (most recent call last):
      ...
    libsym.errors.NotFound: this daemon is in no fleet: see `etcd` in symphony.toml(5)
    """
    return (yield from _object(Op.FLEET_MACHINES, payload=json.dumps([change, machine]).encode()))


def _object(op: Op, flags: int = 0, payload: bytes = b"") -> Script[dict[str, Any]]:
    reply = yield Call(op, flags=flags, payload=payload)
    found: dict[str, Any] = parse(reply.payload)
    return found
