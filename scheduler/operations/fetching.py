"""kv_fetch: a program copies a file of another daemon."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from kvfs.fs import OpenKv
from kvfs.names.inode import Credentials
from libsym.abi import Op
from libsym.errors import Invalid, NotFound
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import json_of, mode_of
from scheduler.wire.replies import Reply


class Fetcher(Protocol):
    """The other daemons of a fleet."""

    async def fetch(self, creds: Credentials, peer: str, path: str, new_path: str | None, mode: int) -> OpenKv:
        """Make a file with the entries of a peer's file, and open it for writing."""
        ...


class _NoPeers:
    async def fetch(self, _creds: Credentials, peer: str, path: str, _new_path: str | None, _mode: int) -> OpenKv:
        raise NotFound(f"{path} of {peer}: this daemon has no peers; see `peers` in symphony.toml(5)")


NO_PEERS = _NoPeers()


class Fetching:
    """Answers KV_FETCH."""

    def __init__(self, peers: Fetcher) -> None:
        self._peers = peers

    def table(self) -> Table:
        return {Op.KV_FETCH: Operation(self._fetch, max_waiting=MAX_LATER, opens=True)}

    def _fetch(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        names = json_of(call.request, call.request.payload, max_texts=3, max_other_bytes=64)
        match names:
            case [str(peer), str(path), str() | None as new_path]:
                return self._opened(call.lip, peer, path, new_path, mode_of(call.request))
        raise Invalid("KV_FETCH takes a peer, a path and a new path")

    async def _opened(self, lip: Lip, peer: str, path: str, new_path: str | None, mode: int) -> Reply:
        return lip.opened(await self._peers.fetch(lip.credentials, peer, path, new_path, mode))
