"""Tenants: each key's own directory, domain, connection and cache. Without keys there is one, called `local`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath

import anyio

import libsym as sym
from lips.gateway.admission import Limits
from lips.gateway.cache import Cache
from lips.gateway.errors import ApiError
from lips.gateway.file_names import ATTRIBUTE, conversation_name, file_name, is_cut
from lips.gateway.places import Place

LOCAL = "local"
DEFAULT_QUOTA_BYTES = 1 << 40
_OPEN_TRIES = 8


@dataclass(frozen=True, slots=True)
class Session:
    """Where what was said is kept: the file of a conversation, or of a key of the prompt cache."""

    path: str
    whole_name: str | None = None
    """The conversation's name, where that of the file is cut."""


class Tenant:
    """A party, which knows nothing of the others."""

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
        """`root`: of its paths over this connection, "" in a domain.

        `make_room`: where the machine has no room left, drop of somebody's cache; return how many files went.
        """
        self.name = name
        self._root = root
        self.place = place
        """The tenant's directory as the machine's other programs have it."""
        self.connection = connection
        self._quota_bytes = quota_bytes
        self.limits = Limits()
        self.make_room = make_room
        self.cache = Cache(max_tokens)
        self._lengths: dict[int, int] = {}  # by inode: of conversations that are being answered here, before that turn
        self._kept_names: set[str] = set()
        self.saving = anyio.Lock()
        """Conversations that were sent as a whole are saved one after the other: the last one stays."""
        self.num_prompt_tokens = self.num_cached_tokens = self.num_completion_tokens = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Calls of this task are the tenant's."""
        with self.connection.use():
            yield

    async def set_quota(self, num_bytes: int | None) -> None:
        """As the file of keys now has it."""
        if num_bytes is not None and num_bytes != self._quota_bytes:
            await anyio.to_thread.run_sync(_make, self.place, num_bytes)
            self._quota_bytes = num_bytes

    @property
    def sessions(self) -> str:
        """The directory of its conversations."""
        return f"{self._root}sessions"

    @property
    def responses(self) -> str:
        """The directory of what POST /v1/responses has stored."""
        return f"{self._root}responses"

    @property
    def cached(self) -> str:
        """The directory of prompts that clients gave a key."""
        return f"{self._root}cached"

    def session(self, name: str) -> Session:
        """Return where a conversation is."""
        stem = self.file_of(name)
        return Session(f"{self.sessions}/{stem}.kv", name if is_cut(stem) and stem != name else None)

    def file_of(self, name: str) -> str:
        """Return the name of a conversation's file, without its suffix."""
        return name if name in self._kept_names else file_name(name)

    async def name_of(self, stem: str) -> str:
        """Return the conversation of a file that is there. A file keeps a name that no rule of today gives."""
        name = conversation_name(stem)
        if is_cut(stem):
            with suppress(OSError):  # gone meanwhile, or without the attribute
                name = (await anyio.to_thread.run_sync(self._attribute, f"{stem}.kv")).decode(errors="replace")
        if file_name(name) != stem:
            self._kept_names.add(name := stem)
        return name

    async def tell_name(self, file: str, session: Session) -> None:
        """Keep with a file the whole name of the conversation that it is for, where its own is cut."""
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
        """The file that a conversation's name has, with its lock, and its length: nobody else has a turn in it.

        None: there was none, and the conversation begins with a new one.

        The lock excludes other gateways and programs, too; who comes second is told 409.
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
                if not is_its_own:  # also for a client that goes now: the lock would be held until a collection
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
        """As `talking`, for a turn, which ends when its client has all of it: until then no reader here sees it."""
        async with self.talking(path, may_begin=True) as (kv, length):
            number = (await sym.aio.kv_stat(kv)).ino  # the name may be another file's before it ends
            self._lengths[number] = length or 0
            try:
                yield kv, length
            finally:
                del self._lengths[number]

    async def is_at(self, kv: sym.KV, path: str) -> bool:
        """Whether the path still means the open file."""
        try:
            return (await sym.aio.kv_stat(path)).ino == (await sym.aio.kv_stat(kv)).ino
        except sym.NotFound:
            return False

    @asynccontextmanager
    async def up_to_last_turn(self, path: str) -> AsyncIterator[sym.KV]:
        """A fork of a conversation as its last ended turn left it; nothing waits for a turn that is under way."""
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
    """The directory is made if need be; with a quota it is a domain, which the connection can't leave."""
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
    """Make what is not there yet. A directory becomes a domain, by its quota, while it is empty."""
    with place.opened(make=True) as directory:
        if quota_bytes is not None:
            os.setxattr(directory, "user.kv.quota", str(quota_bytes).encode())
    for name in ("sessions", "responses", "cached"):
        with place.opened(name, make=True):
            pass
