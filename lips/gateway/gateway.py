"""State that all interfaces of a server share: the model, the tenants, and the requests in flight."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.abc
from starlette.requests import Request

import libsym as sym
from lips.gateway import engine, stored
from lips.gateway.admission import Admission
from lips.gateway.asgi import read_body
from lips.gateway.asked import Asked
from lips.gateway.engine import Answers
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields, parse_json
from lips.gateway.keys import Key, Keys, OneKey
from lips.gateway.log import SEEN
from lips.gateway.origins import check_is_own
from lips.gateway.places import Place, own_place
from lips.gateway.prompts import Prompts
from lips.gateway.request_fields import check, shown
from lips.gateway.sampling import Sampling
from lips.gateway.tenants import Tenant, make_tenant

log = logging.getLogger(__name__)
_CACHED_SHARE = 0.5
_SWEPT_EVERY_S = 3600.0
_LOOKS_EVERY_S = 1.0
_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Default sampling settings, for models that have no default settings themselves."""
_BODIES_AT_ONCE = 8
"""Number of bodies of the maximum size that one tenant may have in flight. The limit counts their bytes."""
_TOKEN_BYTES = 1024
"""Bytes of a body that are charged as one token: parsing and tokenizing them takes about as long as a small model's
step for one token."""
ENDED = "symphony.ended"
"""Key in a request's scope: the functions to call at the end of the request."""
IGNORED = "symphony.ignored"
"""Key in a request's scope: the fields without effect, an `Ignored`."""
_MAX_UNKNOWN_LOGGED = 1024
"""Maximum number of unknown fields in the log; each is logged once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings from the command line."""

    directory: str | None = None
    max_body_bytes: int = 8 << 20
    body_s: float = 30.0
    answer_s: float = 600.0
    max_running: int = 256
    max_waiting: int = 1024
    wait_s: float = 300.0
    is_strict: bool = False
    """Whether unknown fields are refused."""


@dataclass(slots=True)
class Gateway:
    """State of one server."""

    settings: Settings
    model: sym.ModelInfo
    vocabulary: Sequence[bytes]
    keys: Keys
    max_cached_tokens: int
    """Tokens that one tenant's cache may hold."""
    admission: Admission
    prompts: Prompts
    directory: str
    """The gateway's own directory, relative to the mount."""
    tenants: dict[str, Tenant] = field(default_factory=dict)
    started_s: int = field(default_factory=lambda: int(time.time()))
    unknown_logged: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of a route and an unknown field that were logged."""
    num_requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Numbers of requests by route and status."""
    num_gone: int = 0
    """Number of generations that ended early because their client had disconnected."""
    responses: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Responses of /v1/responses in flight, by tenant and id."""
    background: anyio.abc.TaskGroup = field(init=False)
    """Task group for work without a waiting client; `serve` sets it."""
    ending: anyio.Event = field(default_factory=anyio.Event)
    _making: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def sampling(self) -> Mapping[str, float]:
        """Sampling settings for requests that give none."""
        return self.model.sampling or _SAMPLING

    async def tenant_of(self, request: Request) -> Tenant:
        """Return the tenant of a request's key, or of its client's account if the request has no key."""
        key = self.keys.find(_presented(request)) or self._key_of_account(request)
        tenant = await self._tenant(key.name, key.quota_bytes)
        tenant.limits = key.limits
        return tenant

    def _key_of_account(self, request: Request) -> Key:
        """Return the gateway's one key for a request without a key, if the gateway's own account or root sent it."""
        if not isinstance(self.keys, OneKey):
            raise ApiError(
                401, "this server wants a key that it knows: Authorization: Bearer KEY", code="invalid_api_key"
            )
        if request.state.uid not in {0, os.geteuid()}:
            raise ApiError(
                403,
                "without a key this server answers only programs of its own account and of root on this machine: "
                "send Authorization: Bearer KEY, with the key that it printed after #key= when it started",
                code="invalid_api_key",
            )
        check_is_own(request)
        return self.keys.key

    async def _tenant(self, name: str, quota_bytes: int | None) -> Tenant:
        async with self._making:
            found = self.tenants.get(name)
            if found is None or not found.connection.is_open:
                await self.connect()
                found = await make_tenant(
                    Place(self.model.mount, self.directory), name, self.max_cached_tokens, quota_bytes, self._make_room
                )
                await stored.sweep(found)
                self.tenants[name] = found
            await found.set_quota(quota_bytes)
            return found

    async def watch(self) -> None:
        """Log each loss and each return of the connection to the daemon, until cancelled."""
        while True:
            try:
                while True:
                    await sym.aio.recv()  # no program sends messages to a gateway: this waits for the daemon's end
            except sym.SymError:
                log.warning("the daemon has gone: requests have status 503 until it is back")
            while not await self._is_back():  # noqa: ASYNC110 - a daemon's start sends no event
                await anyio.sleep(_LOOKS_EVERY_S)
            log.warning("the daemon is back, with the model %s", self.model.name)

    async def _is_back(self) -> bool:
        try:
            await self.connect()
        except sym.NotConnected:
            return False
        except sym.SymError as error:
            log.warning("the daemon takes no connection: %s", error)
            return False
        return True

    async def sweep(self) -> None:
        """Remove expired files at intervals, until cancelled."""
        while True:
            await anyio.sleep(_SWEPT_EVERY_S)
            for tenant in list(self.tenants.values()):
                try:
                    await stored.sweep(tenant)
                except OSError as error:
                    log.warning("%s: expired files stay: %s", tenant.name, error)

    def _make_room(self) -> int:
        """Halve the largest cache of all tenants; return the number of dropped entries."""
        caches = [tenant.cache for tenant in self.tenants.values() if tenant.connection.is_open]
        largest = max(caches, key=lambda cache: cache.num_tokens)
        return largest.shrink(largest.num_tokens // 2)

    async def connect(self) -> None:
        """Connect again after a restart of the daemon, which may have another model. A live connection stays."""
        await sym.aio.connect()
        self.model, self.vocabulary = await sym.aio.model_info(), await sym.aio.vocabulary()
        self.prompts = Prompts()  # another model may have the same name

    async def fields_of(self, request: Request, tenant: Tenant) -> Fields:
        """Read the fields of a request. The request is counted first, and charged for the size of its body."""
        name, settings, ended = tenant.name, self.settings, request.scope[ENDED]

        def hold(num_bytes: int) -> None:
            self.admission.hold(name, num_bytes)
            ended.callback(self.admission.release, name, num_bytes)

        self.admission.count(name, tenant.limits)
        body = await read_body(request, settings.max_body_bytes, settings.body_s, hold)
        self.admission.charge(name, len(body) // _TOKEN_BYTES)
        fields = Fields(parse_json(body))
        self._check_fields(request, fields)
        return fields

    def _check_fields(self, request: Request, fields: Fields) -> None:
        """Record fields without effect for the answer's header; log unknown fields."""
        route = request.scope["route"].path
        ignored = check(route, fields.body, is_strict=self.settings.is_strict)
        request.scope[IGNORED] = ignored
        for path in ignored.unknown:
            if (route, path) not in self.unknown_logged and len(self.unknown_logged) < _MAX_UNKNOWN_LOGGED:
                self.unknown_logged.add((route, path))
                log.warning("%s: a client sends the unknown field %s, which has no effect", route, shown(path))

    @asynccontextmanager
    async def answered(self, tenant: Tenant, asked: Asked) -> AsyncIterator[Answers]:
        """Admit a request, and answer it by `engine.answered`."""
        self.check_length(len(asked.prompt.tokens))
        self._check_breakers(asked.sampling.sampler.dry)
        answers: Answers | None = None
        charge = partial(self.admission.charge, tenant.name)
        seen = SEEN.get()
        async with self.admission.enter(tenant.name, tenant.limits):
            try:
                with tenant.use():
                    async with engine.answered(tenant, asked, self.prompts, charge) as answers:
                        seen.begin()
                        yield answers
            finally:  # tokens computed for a disconnected client count, too
                if seen.is_gone:
                    self.num_gone += asked.sampling.n if answers is None else answers.num_cancelled
                if answers is not None:
                    seen.usage.add(answers.usage)
                    tenant.usage.add(answers.usage)
                    charge(answers.usage.num_completion)

    def room(self, sampling: Sampling) -> int:
        """Return the number of tokens that a prompt may have beside an answer of full length."""
        return self.model.max_positions - (sampling.max_tokens or 1)

    def _check_breakers(self, dry: sym.Dry | None) -> None:
        """Refuse a sequence breaker of DRY that occurs in no token: such a text could never break a repetition."""
        if dry is None or not dry.is_on:
            return
        texts = b"\0".join(self.vocabulary)
        for text in dry.breakers:
            if text.encode() not in texts:
                name = "dry_sequence_breakers"
                raise ApiError(400, f"{name}: {text!r} is in no token of {self.model.name}", param=name)

    def check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that leaves no room for an answer of one token."""
        most = self.model.max_positions
        if num_tokens >= most:
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens, and the context of {self.model.name} is {most}: send fewer or "
                "shorter messages",
                code="context_length_exceeded",
            )


def _presented(request: Request) -> str:
    """Return the key in the header of OpenAI's or of Anthropic's interface."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def make_gateway(settings: Settings, keys: Keys) -> Gateway:
    """Make the gateway for the running daemon."""
    model, stat = await sym.aio.model_info(), await sym.aio.daemon_stat()
    room = int(stat["num_pages"]) * model.page_entries
    place = await anyio.to_thread.run_sync(own_place, model.mount, settings.directory)
    return Gateway(
        settings=settings,
        model=model,
        vocabulary=await sym.aio.vocabulary(),
        keys=keys,
        max_cached_tokens=int(room * _CACHED_SHARE),
        admission=Admission(
            settings.max_running,
            settings.max_waiting,
            settings.wait_s,
            max_bytes=_BODIES_AT_ONCE * settings.max_body_bytes,
        ),
        prompts=Prompts(),
        directory=place.path,
    )
