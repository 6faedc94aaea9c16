"""Whole members of a fleet in one process: a file system, peers, a place in the list of machines, and names in etcd."""

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import trio

from kvfs.durable.watched import WatchedJournal
from kvfs.fs import OpenKv
from kvfs.names.agreement import when_settled
from kvfs.names.inode import Credentials, Inode
from symphony.fleet import membership
from symphony.fleet.client import Peers
from symphony.fleet.etcd import Etcd
from symphony.fleet.link import contexts
from symphony.fleet.membership import Membership
from symphony.fleet.names import FleetNames
from symphony.fleet.server import PeerServer
from symphony.fleet.versions import Versions
from tests.symphony.fleet.machines import USER, Machine

T = TypeVar("T")

ROOT = Credentials(0, 0)


class Member:
    """A machine of a fleet, without a mount."""

    def __init__(self, directory: Path, keys: Path, url: str, fleet: str, name: str, copies: int) -> None:
        self.journal = WatchedJournal(lambda: self.tree)
        self.machine, self.name = Machine(directory, name, changes=self.journal), name
        self.fs, self.tree = self.machine.fs, self.machine.fs.volume.tree
        self.etcd = Etcd([url], None)
        self._bound = socket.create_server(("127.0.0.1", 0))
        host, port = self._bound.getsockname()
        identity = dict(self.fs.volume.model.identity)
        facts = membership.Machine(f"{host}:{port}", f"state of {name}", "fake", identity, "", 1, 1)
        self.membership = Membership(self.etcd, fleet, name, lambda: facts)
        server, client = contexts(keys / name)
        peers = Peers(self.fs, self.membership.addresses, client)
        self.versions = Versions(self.fs, peers, self.membership, copies)
        self.names = FleetNames(self.fs, self.etcd, fleet, self.membership, self.versions)
        self._server = PeerServer(self.fs, server, self._bound, lambda: None, self.versions.keep)
        self.running = self.following = trio.CancelScope()

    async def run(self) -> None:
        await self.membership.join()
        with trio.CancelScope() as self.running:
            await self._run()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._server.run)
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.follow)

    async def follow(self) -> None:
        """Follow the names until `following` is cancelled."""
        with trio.CancelScope() as self.following:
            await self.names.run()

    async def call(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        """Make a call as a program does."""

        async def attempt() -> T:
            return function(*arguments, **named)

        return await when_settled(attempt)

    async def mkdir(self, path: str, mode: int = 0o755, creds: Credentials = ROOT) -> None:
        await self.call(self.fs.kv_mkdir, creds, path, mode)

    async def open(self, path: str, *, write: bool = False, creds: Credentials = ROOT) -> OpenKv:
        return await self.call(self.fs.kv_open, creds, path, write=write)

    async def make(self, path: str, length: int) -> OpenKv:
        """Make a file with some entries, and leave it open."""
        file = await self.call(self.fs.kv_create, ROOT, path)
        self.machine.append(file, range(length))
        return file

    async def length(self, path: str) -> int:
        """Open a file, and return its number of entries."""
        file = await self.open(path)
        self.fs.kv_close(file)
        return file.table.length

    def listing(self, directory: Inode | None = None, path: str = "") -> list[str]:
        """Return all names of the fleet, with what they are."""
        found = list[str]()
        for name, inode in sorted((directory or self.names.root).entries.items()):
            if inode is not self.names.local:
                here = f"{path}/{name.decode()}"
                target = inode.target.decode(errors="replace")
                found.append(f"{here} {inode.kind} {inode.mode:o} {inode.uid} {inode.gid} {target}")
                found += self.listing(inode, here) if inode.is_directory else ()
        return found

    def close(self) -> None:
        self.etcd.close()
        self._bound.close()


@asynccontextmanager
async def fleet_of(
    directory: Path, keys: Path, url: str, fleet: str, names: Sequence[str] = ("east", "west"), copies: int = 1
) -> AsyncIterator[list[Member]]:
    """Run members of a fleet that know each other."""
    members = [Member(directory, keys, url, fleet, name, copies) for name in names]
    try:
        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(member.run)
            with trio.fail_after(20):
                while any(each.membership.addresses.keys() | {each.name} != {*names} for each in members):
                    await trio.sleep(0.01)
                    for each in members:
                        with suppress(trio.TooSlowError):
                            await each.membership._renew()
            for member in members:
                await member.call(member.fs.directory, ROOT, "fleet")
            yield members
            nursery.cancel_scope.cancel()
    finally:
        for member in members:
            member.close()
            member.fs.check()


__all__ = ["ROOT", "USER", "Member", "fleet_of"]
