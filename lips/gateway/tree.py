"""Routes of the page at /tree: KV files and forks as they change, and the tokens of a file.

The page sees what the tenant's connection may see, and reads files through that connection. Probabilities are computed
on request over a fork, which is closed afterwards, and are charged as the tokens of any other request.
"""

from __future__ import annotations

import os
import time
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import Json, Outlet, Streamed, event
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.gateway import Gateway
from lips.gateway.keys import OneKey
from lips.gateway.logprobs import token_forms
from lips.gateway.reader import asker
from lips.gateway.tenants import Tenant

LEAST_S = 1 / 30
"""Least time between two events."""
ALIVE_S = 10.0
"""Time after which an event without files shows that the stream is alive."""
NAMES_S = 1.0
"""Least time between two lists of programs."""
MAX_STREAMS = 8
"""Maximum number of streams of one tenant."""
MOST_TOKENS = 1024
"""Most tokens in an answer with the text of a file."""
ODDS_TOKENS, TOP = 64, 5
"""Most tokens whose probabilities one request computes, and alternatives for each."""
_FACTS = tuple(name for name in sym.KvChange.__slots__ if name != "ino")


async def _reader(request: Request) -> tuple[Gateway, Tenant]:
    """Return the gateway and the tenant whose files a request may see. The connection of the gateway's one key sees all
    that the gateway's account sees, so only that account and root on this machine may use it here.
    """
    gateway, tenant = await asker(request)
    if isinstance(gateway.keys, OneKey) and request.state.uid not in {0, os.geteuid()}:
        raise ApiError(
            403,
            "without --keys this server shows the account's files only to programs of its own account and of root on "
            "this machine",
        )
    return gateway, tenant


async def changes(request: Request) -> Streamed:
    """Stream what has happened to files since a change."""
    gateway, tenant = await _reader(request)
    since = _number(request, "since", 0)

    async def answer(outlet: Outlet) -> None:
        if tenant.num_streams >= MAX_STREAMS:
            raise ApiError(429, f"{tenant.name} has {MAX_STREAMS} streams of changes open already", retry_after_s=5)
        tenant.num_streams += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stream, request, tenant, since, outlet)
                await gateway.ending.wait()
                tasks.cancel_scope.cancel()
        finally:
            tenant.num_streams -= 1

    return Streamed(answer, lambda error: event(openai_form(error)))


async def _stream(request: Request, tenant: Tenant, since: int, outlet: Outlet) -> None:
    names = _Names()
    with tenant.use():
        while True:
            found = await sym.aio.kv_changes(since, timeout=ALIVE_S)
            await _reader(request)  # ApiError: the key was withdrawn since the last event
            since = found.since
            data: dict[str, Any] = {"since": since, "files": [_facts(file) for file in found.files]}
            if found.whole:
                data["whole"] = True
            if programs := await names.new({file.program for file in found.files}):
                data["programs"] = programs
            outlet.put(event(data))
            await outlet.flush()
            await anyio.sleep(LEAST_S)


def _facts(file: sym.KvChange) -> dict[str, Any]:
    """Return a file's facts, without those that are false, 0 or unknown."""
    return {"ino": file.ino} | {name: fact for name in _FACTS if (fact := getattr(file, name))}


class _Names:
    """Names of programs, by id, as one stream has told them."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._wanted: set[str] = set()
        self._next_s = 0.0

    async def new(self, programs: set[str | None]) -> dict[str, str]:
        """Return the names of programs that the stream has not told. Further names come with later events."""
        self._wanted |= {each for each in programs if each is not None} - self._told
        now_s = time.monotonic()
        if not self._wanted or now_s < self._next_s:
            return {}
        self._next_s = now_s + NAMES_S
        found = {each.id: each.name for each in await sym.aio.programs(ended=True) if each.id in self._wanted}
        self._told |= self._wanted
        self._wanted = set()
        return found


async def tokens(request: Request) -> Response:
    """Return the texts of a file's tokens, from the token `first` on."""
    gateway, tenant = await _reader(request)
    path, first = _path(request), _number(request, "first", 0)
    with tenant.use():
        async with await sym.aio.kv_open(path) as kv:
            ids, _ = await sym.aio.kv_read(kv, first, first + MOST_TOKENS)
            stat = await sym.aio.kv_stat(kv)
    texts = [gateway.vocabulary[each].decode(errors="replace") for each in ids]
    return Json({"path": path, "first": first, "tokens": stat.tokens, "texts": texts})


async def odds(request: Request) -> Response:
    """Compute the distributions that ODDS_TOKENS tokens of a file were drawn from, over a fork of the file."""
    gateway, tenant = await _reader(request)
    fields = await gateway.fields_of(request, tenant)
    path, first = fields.required("path"), fields.required("first")
    if not isinstance(path, str) or type(first) is not int or first < 0:
        raise ApiError(400, "path has to be a text, and first a number of a token")
    async with gateway.admission.enter(tenant.name, tenant.limits):
        with tenant.use():
            async with await sym.aio.kv_fork(path) as kv:
                found = await _odds(gateway, tenant, kv, first)
    return Json({"path": path, "first": first, "odds": found})


async def _odds(gateway: Gateway, tenant: Tenant, kv: sym.KV, first: int) -> list[dict[str, Any] | None]:
    begin = max(first, 1)  # no distribution precedes the first token
    ids, positions = await sym.aio.kv_read(kv, begin - 1, first + ODDS_TOKENS)
    unknown: list[dict[str, Any] | None] = [None] * (begin - first)
    if len(ids) < 2:
        return unknown[: len(ids)]
    await sym.aio.kv_truncate(kv, begin - 1)
    gateway.admission.charge(tenant.name, len(ids) - 1)
    rows = await sym.aio.pred(kv, ids[:-1], positions[:-1], rows="all", top_k=TOP, logprobs=sorted(set(ids[1:])))
    return unknown + token_forms(ids[1:], [rows[at] for at in range(len(ids) - 1)], gateway.vocabulary, TOP)


def _path(request: Request) -> str:
    path = request.query_params.get("path")
    if not path:
        raise ApiError(400, "path is missing: a file's path", param="path")
    return path


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ApiError(400, f"{name} has to be a number", param=name)
    return int(text)


routes = [
    Route("/tree/changes", changes),
    Route("/tree/tokens", tokens),
    Route("/tree/odds", odds, methods=["POST"]),
]
