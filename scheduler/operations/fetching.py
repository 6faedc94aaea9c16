"""kv_fetch, fleet_place and fleet_machines: a program copies a file of another daemon, or asks about the fleet."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from kvfs.fs import OpenKv
from kvfs.names.inode import Credentials
from libsym.abi import FLEET_BEGIN, Op
from libsym.errors import Invalid, NotFound
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table, require_operator
from scheduler.wire.payloads import json_of, mode_of
from scheduler.wire.replies import Reply, json_reply

NO_FLEET = "this daemon is in no fleet: see `etcd` in symphony.toml(5)"
CHANGES = ("", "drain", "return", "leave", "lose")
"""Changes of the state of a machine. `lose` is a `leave` that loses what only this machine has."""
MAX_FILES = 64
"""Maximum number of files of a question."""


class Others(Protocol):
    """The other daemons of a fleet."""

    async def fetch(self, creds: Credentials, peer: str, path: str, new_path: str | None, mode: int) -> OpenKv:
        """Make a file with the entries of a peer's file, and open it for writing."""
        ...

    async def place(self, creds: Credentials, paths: Sequence[str], *, begins: bool) -> dict[str, Any]:
        """Return the machine for a program that uses these files, and why."""
        ...

    async def machines(self, change: str, machine: str) -> dict[str, Any]:
        """Change the state of a machine, unless `change` is empty. Return all machines, and what they hold."""
        ...


class _NoPeers:
    async def fetch(self, _creds: Credentials, peer: str, path: str, _new_path: str | None, _mode: int) -> OpenKv:
        raise NotFound(f"{path} of {peer}: this daemon has no peers; see `peers` in symphony.toml(5)")

    async def place(self, _creds: Credentials, _paths: Sequence[str], *, begins: bool) -> dict[str, Any]:
        del begins
        raise NotFound(NO_FLEET)

    async def machines(self, _change: str, _machine: str) -> dict[str, Any]:
        raise NotFound(NO_FLEET)


NO_PEERS = _NoPeers()


class Fetching:
    """Answers KV_FETCH, FLEET_PLACE and FLEET_MACHINES."""

    def __init__(self, peers: Others) -> None:
        self._peers = peers

    def table(self) -> Table:
        return {
            Op.KV_FETCH: Operation(self._fetch, max_waiting=MAX_LATER, opens=True),
            Op.FLEET_PLACE: Operation(self._place, max_waiting=MAX_LATER),
            Op.FLEET_MACHINES: Operation(self._machines, max_waiting=MAX_LATER),
        }

    def _fetch(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        names = json_of(call.request, call.request.payload, max_texts=3, max_other_bytes=64)
        match names:
            case [str(peer), str(path), str() | None as new_path]:
                return self._opened(call.lip, peer, path, new_path, mode_of(call.request))
        raise Invalid("KV_FETCH takes a peer, a path and a new path")

    def _place(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        paths = json_of(call.request, call.request.payload, max_texts=MAX_FILES, max_other_bytes=2 * MAX_FILES)
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise Invalid("FLEET_PLACE takes a list of paths")
        return self._placed(call.lip, paths, bool(call.request.flags & FLEET_BEGIN))

    def _machines(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        match json_of(call.request, call.request.payload, max_texts=2, max_other_bytes=64):
            case [str(change), str(machine)] if change in CHANGES:
                if change:
                    require_operator(call, "change the state of a machine")
                return self._changed(change, machine)
        raise Invalid(f"FLEET_MACHINES takes one of {', '.join(map(repr, CHANGES))}, and the name of a machine")

    async def _changed(self, change: str, machine: str) -> Reply:
        return json_reply(await self._peers.machines(change, machine))

    async def _placed(self, lip: Lip, paths: list[str], begins: bool) -> Reply:
        return json_reply(await self._peers.place(lip.credentials, paths, begins=begins))

    async def _opened(self, lip: Lip, peer: str, path: str, new_path: str | None, mode: int) -> Reply:
        return lip.opened(await self._peers.fetch(lip.credentials, peer, path, new_path, mode))
