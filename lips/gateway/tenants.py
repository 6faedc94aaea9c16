"""Tenants: each key's own directory, domain, connection and cache. Without keys there is one, called `local`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import anyio

import libsym as sym
from lips.gateway.admission import Limits
from lips.gateway.cache import Cache
from lips.gateway.errors import ApiError

ROOT = "gateway"
LOCAL = "local"
DEFAULT_QUOTA_BYTES = 1 << 40
MAX_NAME_BYTES = 200


class Tenant:
    """One party, which knows nothing of the others."""

    def __init__(
        self, name: str, root: str, place: Path, connection: sym.Connection, max_tokens: int, quota_bytes: int | None
    ) -> None:
        """`root`: of its paths over this connection, "" in a domain."""
        self.name = name
        self._root = root
        self.place = place
        """Its directory as the machine's other programs see it."""
        self.connection = connection
        self._quota_bytes = quota_bytes
        self.limits = Limits()
        self.make_room: Callable[[], int] = lambda: 0
        """Where the machine has none left, the gateway drops of somebody's cache: gives how many files went."""
        self.cache = Cache(max_tokens)
        self._talking: set[str] = set()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_completion_tokens = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Calls of this task are the tenant's."""
        with self.connection.use():
            yield

    async def set_quota(self, num_bytes: int | None) -> None:
        """As the file of keys now has it."""
        if num_bytes is not None and num_bytes != self._quota_bytes:
            await _set_quota(self.place, num_bytes)
            self._quota_bytes = num_bytes

    @property
    def sessions(self) -> str:
        """The directory of its conversations."""
        return f"{self._root}sessions"

    @property
    def responses(self) -> str:
        """The directory of what POST /v1/responses has stored."""
        return f"{self._root}responses"

    def session_path(self, name: str) -> str:
        """Of a conversation. A name that is none of a file is refused."""
        wrong = not 1 <= len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES or any(
            c == "/" or c < " " for c in name
        )
        if wrong or name.startswith("."):
            raise ApiError(
                400, f"{name[:40]!r} names no conversation: 1 to {MAX_NAME_BYTES} bytes, no / and no . in front"
            )
        return f"{self.sessions}/{name}.kv"

    @contextmanager
    def nobody_else_talks(self, name: str) -> Iterator[None]:
        """A conversation, by the path of its file, has one turn at a time."""
        if name in self._talking:
            what = PurePath(name).stem
            raise ApiError(409, f"conversation {what} is being answered: wait for the end of that", retry_after_s=1)
        self._talking.add(name)
        try:
            yield
        finally:
            self._talking.remove(name)


async def make_tenant(name: str, max_tokens: int, quota_bytes: int | None) -> Tenant:
    """The directory is made if need be; with a quota it is a domain, which the connection can't leave."""
    directory = f"{ROOT}/{name}"
    await sym.aio.kv_mkdir(directory, parents=True)
    place = Path((await sym.aio.model_info()).mount, directory)
    if quota_bytes is None:
        connection, root = await sym.aio.connection(), f"{directory}/"
    else:
        await _set_quota(place, quota_bytes)
        connection, root = await sym.aio.connection(domain=directory), ""
    tenant = Tenant(name, root, place, connection, max_tokens, quota_bytes)
    with tenant.use():
        for each in (tenant.sessions, tenant.responses):
            await sym.aio.kv_mkdir(each, parents=True)
    return tenant


async def _set_quota(place: Path, num_bytes: int) -> None:
    await anyio.to_thread.run_sync(os.setxattr, str(place), "user.kv.quota", str(num_bytes).encode())
