"""Tenants: each key has its own directory, domain, connection and cache. Without keys the one tenant is `local`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath

import anyio

import libsym as sym
from lips.gateway.admission import TenantLimits
from lips.gateway.cache import Cache
from lips.gateway.errors import ApiError
from lips.gateway.file_names import ATTRIBUTE, conversation_name, file_name, is_cut
from lips.gateway.places import Place
from lips.gateway.usage import Usage

LOCAL = "local"
DEFAULT_QUOTA_BYTES = 1 << 40
_OPEN_TRIES = 8


@dataclass(frozen=True, slots=True)
class Session:
    """The file of a conversation, or of a key of the prompt cache."""

    path: str
    whole_name: str | None = None
    """The whole name of the conversation, if the name of the file is cut."""


class Tenant:
    """The clients with one key. No other tenant can access their connection, cache and files."""

    def __init__(
        self,
        name: str,
        root: str,
        place: Place,
        connection: sym.Connection,
        max_tokens: int,
        quota_bytes: int | None,
        make_room: Callable[[], int],
    ) -> None:
        """`root` is the prefix of the tenant's paths on this connection: "" in a domain.

        `make_room` drops entries of some tenant's cache when memory is full, and returns the number of dropped entries.
        """
        self.name = name
        self.sessions = f"{root}sessions"
        """The directory of the tenant's conversations."""
        self.responses = f"{root}responses"
        """The directory of the responses that POST /v1/responses has stored."""
        self.cached = f"{root}cached"
        """The directory of prompts with a `prompt_cache_key`."""
        self.place = place
        """The tenant's directory as a path on the mount."""
        self.connection = connection
        self._quota_bytes = quota_bytes
        self.limits = TenantLimits()
        self.make_room = make_room
        self.cache = Cache(max_tokens)
        self._lengths: dict[int, int] = {}  # by inode: length before the turn in flight
        self._kept_names: set[str] = set()
        self.saving = anyio.Lock()
        """Lock for saves of whole conversations. Saves run one after another, so the last save stays."""
        self.usage = Usage()
        self.num_streams = 0
        """Number of open streams of changes: see `lips.gateway.tree`."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use the tenant's connection for the calls of this task within the block."""
        with self.connection.use():
            yield

    async def set_quota(self, num_bytes: int | None) -> None:
        """Set the quota from the file of keys, if it has changed."""
        if num_bytes is not None and num_bytes != self._quota_bytes:
            await anyio.to_thread.run_sync(_make, self.place, num_bytes)
            self._quota_bytes = num_bytes

    def session(self, name: str) -> Session:
        """Return the session of a conversation's name."""
        stem = self.file_of(name)
        return Session(f"{self.sessions}/{stem}.kv", name if is_cut(stem) and stem != name else None)

    def file_of(self, name: str) -> str:
        """Return the name of a conversation's file, without its suffix."""
        return name if name in self._kept_names else file_name(name)

    async def name_of(self, stem: str) -> str:
        """Return the conversation's name for an existing file. A file named by older rules keeps its name."""
        name = conversation_name(stem)
        if is_cut(stem):
            with suppress(OSError):  # the file is gone, or lacks the attribute
                name = (await anyio.to_thread.run_sync(self._attribute, f"{stem}.kv")).decode(errors="replace")
        if file_name(name) != stem:
            self._kept_names.add(name := stem)
        return name

    async def tell_name(self, file: str, session: Session) -> None:
        """Store the whole name of the conversation in an attribute of the file, if the file's name is cut."""
        name = session.whole_name
        if name is not None:
            await anyio.to_thread.run_sync(self._set_attribute, PurePath(file), name.encode(errors="replace"))

    def _attribute(self, file: str) -> bytes:
        with self.place.file("sessions", file) as found:
            return os.getxattr(found.fileno(), ATTRIBUTE)

    def _set_attribute(self, file: PurePath, value: bytes) -> None:
        with self.place.file(file.parent.name, file.name) as found:
            os.setxattr(found.fileno(), ATTRIBUTE, value)

    @asynccontextmanager
    async def talking(self, path: str, *, may_begin: bool = False) -> AsyncIterator[tuple[sym.KV, int | None]]:
        """Lock a conversation's file against other turns. Yield the file and its length.

        The length is None if the file is new.

        The lock excludes other gateways and programs, too. A second request for the file gets status 409.
        """
        for _ in range(_OPEN_TRIES):
            is_made = False
            try:
                kv = await sym.aio.kv_open(path, "rw")
            except sym.NotFound:
                if not may_begin:
                    raise
                try:
                    kv, is_made = await sym.aio.kv_create(path), True
                except sym.Exists:
                    continue
            is_its_own = False
            try:
                await sym.aio.kv_lock(kv, blocking=False)
                is_its_own = await self.is_at(kv, path)
            except sym.WouldBlock as error:
                why = "wait for the end of that" if self._quota_bytes is not None else str(error)
                raise ApiError(409, f"{_busy(path)}: {why}", retry_after_s=1) from None
            finally:
                if not is_its_own:  # even after a cancellation: else the lock would stay until a garbage collection
                    kv.channel.close_soon(kv.give_up())
            if is_its_own:
                break
        else:
            raise ApiError(409, f"{_busy(path)}: its name moves all the time", retry_after_s=1)
        try:
            yield kv, None if is_made else (await sym.aio.kv_stat(kv)).tokens
        finally:
            if not kv.closed:
                kv.channel.close_soon(kv.give_up())

    @asynccontextmanager
    async def answering(self, path: str) -> AsyncIterator[tuple[sym.KV, int | None]]:
        """Lock the file as `talking` does, for a turn. Readers see the turn only after its client has all of it."""
        async with self.talking(path, may_begin=True) as (kv, length):
            number = (await sym.aio.kv_stat(kv)).ino  # the name may move to another file during the turn
            self._lengths[number] = length or 0
            try:
                yield kv, length
            finally:
                del self._lengths[number]

    async def is_at(self, kv: sym.KV, path: str) -> bool:
        """Return whether the path still names the open file."""
        try:
            return (await sym.aio.kv_stat(path)).ino == (await sym.aio.kv_stat(kv)).ino
        except sym.NotFound:
            return False

    @asynccontextmanager
    async def up_to_last_turn(self, path: str) -> AsyncIterator[sym.KV]:
        """Yield a fork of a conversation up to its last finished turn, without waiting for a turn in flight."""
        async with await sym.aio.kv_open(path) as file:
            num_tokens = self._lengths.get((await sym.aio.kv_stat(file)).ino)
            async with await sym.aio.kv_fork(file, ended=True) as kv:
                if num_tokens is not None and (await sym.aio.kv_stat(kv)).tokens > num_tokens:
                    await sym.aio.kv_truncate(kv, num_tokens)
                yield kv


def _busy(path: str) -> str:
    return f"conversation {conversation_name(PurePath(path).stem)} is being answered"


async def make_tenant(
    gateways: Place, name: str, max_tokens: int, quota_bytes: int | None, make_room: Callable[[], int]
) -> Tenant:
    """Make a tenant, and its directory if need be. With a quota, the directory is the domain of its connection."""
    place = Place(gateways.mount, f"{gateways.path}/{name}")
    await anyio.to_thread.run_sync(_make, place, quota_bytes)
    if quota_bytes is None:
        connection, root = await sym.aio.connection(), f"{place.path}/"
    else:
        connection, root = await sym.aio.connection(domain=place.path), ""
    tenant = Tenant(name, root, place, connection, max_tokens, quota_bytes, make_room)
    with tenant.use():
        for entry in await sym.aio.kv_list(tenant.sessions):
            await tenant.name_of(entry.name.removesuffix(".kv"))
    return tenant


def _make(place: Place, quota_bytes: int | None) -> None:
    """Make missing directories, and set the quota. Setting a quota on an empty directory makes it a domain."""
    with place.opened(make=True) as directory:
        if quota_bytes is not None:
            os.setxattr(directory, "user.kv.quota", str(quota_bytes).encode())
    for name in ("sessions", "responses", "cached"):
        with place.opened(name, make=True):
            pass
