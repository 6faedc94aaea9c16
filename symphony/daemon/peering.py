"""The peers of a daemon: daemons on other machines with which it exchanges files."""

from __future__ import annotations

import errno
import socket
import time
from collections import ChainMap
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from kvfs.fs import FileSystem
from libsym.errors import Invalid, NotFound, NotSupported, SymError
from scheduler.operations.fetching import NO_FLEET, NO_PEERS
from scheduler.status.metrics import Metric, counter, gauge
from symphony.daemon.alone import Alone
from symphony.fleet.client import NO_CACHE, Peers
from symphony.fleet.draining import Holding
from symphony.fleet.etcd import Etcd
from symphony.fleet.link import Copy, contexts, require_name
from symphony.fleet.membership import Load, Machine, Membership
from symphony.fleet.names import FleetNames
from symphony.fleet.placing import Placer
from symphony.fleet.server import PeerServer
from symphony.fleet.store_calls import StoreProcess
from symphony.fleet.versions import Versions
from symphony.settings.config import Config
from symphony.settings.kinds import MACHINE_NAME, address

FREE_PARTS = 16
"""Free memory is published in sixteenths of all memory, since each change is written to the disks of etcd."""

STORE_BYTES = 1 << 30
"""Memory that a machine gives to the store of pages by default."""


class Peering(Alone):
    """The daemon's connections with its peers."""

    def __init__(
        self, config: Config, fs: FileSystem, state: str, catch_up: Callable[[], None], load: Callable[[], Load]
    ) -> None:
        """For the arguments, see `peering_of`. `load`: function that returns the load of this machine."""
        self._server: PeerServer | None = None
        self._membership: Membership | None = None
        self._names: FleetNames | None = None
        keys = config.peer_keys or config.state / "peers"
        for_server, for_client = contexts(keys)
        named = (each.partition("=") for each in config.peers)
        addresses = {name: address(where) for name, _, where in named}
        if config.etcd:
            name = config.machine or _host_name()
            require_name(for_server, for_client, name)
            is_encrypted = any(each.startswith("https:") for each in config.etcd)
            for_etcd = contexts(config.etcd_keys or keys)[1] if is_encrypted else None
            mine = _description(config.peer_listen or "", fs, state, load)
            etcd = Etcd(config.etcd, for_etcd)
            self._membership = Membership(etcd, config.fleet, name, mine)
        found = {} if self._membership is None else self._membership.addresses
        self._store = None
        if config.fleet_store is not None and config.peer_listen is not None:
            here, given = address(config.peer_listen)[0], config.fleet_store_memory or STORE_BYTES
            process = StoreProcess(config.fleet_store, here, given, fs.pool.page_bytes)
            from symphony.fleet.store import Store  # noqa: PLC0415 - needs a package of the extra `fleet`

            self._store = Store(fs, etcd, config.fleet, process)
        self._peers = Peers(fs, ChainMap(addresses, found), for_client, self._store or NO_CACHE)
        placer = None
        keep: Callable[[Copy], Awaitable[None]] = _keep_nothing
        if self._membership is not None:
            versions = Versions(fs, self._peers, self._membership, config.copies)
            self._names, keep = FleetNames(fs, etcd, config.fleet, self._membership, versions), versions.keep
            placer = Placer(fs, self._membership, self._names, self._peers)
        self.others = _Others(self, self._peers, placer)
        if config.peer_listen is not None:
            self._server = PeerServer(fs, for_server, _bound(config.peer_listen), catch_up, keep)

    def info(self) -> dict[str, Any]:
        sent = 0 if self._server is None else self._server.num_pages_sent
        return {"names": self._peers.names, "pages_received": self._peers.num_pages_received, "pages_sent": sent}

    def fleet(self) -> dict[str, Any] | None:
        if self._membership is None or self._names is None:
            return None
        names = {"names": self._names.num_names, "names_trouble": self._names.trouble}
        return {**self._membership.info(), **names, "store": None if self._store is None else self._store.info()}

    async def machines(self, change: str, machine: str) -> dict[str, Any]:
        """Change the state of a machine, unless `change` is empty. Return the fleet, with what the machines hold."""
        if self._names is None:
            raise NotFound(NO_FLEET)
        await self._names.draining.change(change, machine)
        return {**(self.fleet() or {}), **self._names.draining.info(has_paths=bool(change))}

    def metrics(self) -> list[Metric]:
        pages = self.info()
        found = [
            counter("symphony_peer_pages_received_total", "Pages that peers have sent.", pages["pages_received"]),
            counter("symphony_peer_pages_sent_total", "Pages that were sent to peers.", pages["pages_sent"]),
        ]
        fleet = self.fleet()
        if fleet is None or self._names is None or self._membership is None:
            return found
        draining, me = self._names.draining, self._membership.name
        held = draining.holdings.get(me, Holding())
        found += [
            gauge("symphony_fleet_machines", "Machines of the fleet that etcd listed last.", len(fleet["machines"])),
            gauge("symphony_fleet_connected", "1 when etcd answers and lists this daemon.", int(not fleet["trouble"])),
            gauge("symphony_fleet_names", "Files and directories below /fleet of the mount.", fleet["names"]),
            gauge("symphony_fleet_follows", "1 when changes of names arrive.", int(not fleet["names_trouble"])),
            gauge("symphony_fleet_drained", "1 when this machine is drained.", int(me in fleet["drained"])),
            gauge("symphony_fleet_versions", "Versions that this machine has, at the last count.", held.versions),
            gauge("symphony_fleet_writing", "Files that this machine writes, at the last count.", held.writing),
            gauge("symphony_fleet_copies_missing", "Copies that were missing at the last count.", draining.num_missing),
        ]
        if (store := fleet["store"]) is not None:
            answers = int(not store["trouble"])
            found += [
                gauge("symphony_fleet_store_answers", "1 when the store of pages answers.", answers),
                counter("symphony_fleet_store_got_total", "Pages that came from the store.", store["pages_got"]),
                counter("symphony_fleet_store_put_total", "Pages that were put into the store.", store["pages_put"]),
            ]
        return found

    async def join(self) -> None:
        if self._membership is not None:
            await self._membership.join()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._server is not None:
                nursery.start_soon(self._server.run)
            if self._membership is not None:
                nursery.start_soon(self._membership.run)
            if self._names is not None:
                nursery.start_soon(self._names.run)
            if self._store is not None:
                nursery.start_soon(self._store.run)

    async def close(self, limit_s: float) -> None:
        if self._names is not None:
            await self._names.close(limit_s)


class _Others:
    """The other daemons, as calls of programs use them. Satisfies `Others`."""

    def __init__(self, peering: Peering, peers: Peers, placer: Placer | None) -> None:
        self.fetch, self.machines = peers.fetch, peering.machines
        self.place = NO_PEERS.place if placer is None else placer.place


async def _keep_nothing(_request: Copy) -> None:
    raise NotSupported("this daemon is in no fleet")


def _description(where: str, fs: FileSystem, state: str, load: Callable[[], Load]) -> Callable[[], Machine]:
    """Return a function that describes this daemon to other machines."""
    began_s = int(time.time())

    def describe() -> Machine:
        tiers, model = fs.volume.pager.statistics(), fs.volume.model
        num_free = tiers.num_free_frames * FREE_PARTS // tiers.num_frames * tiers.num_frames // FREE_PARTS
        free_bytes = num_free * fs.pool.page_bytes
        return Machine(where, state, model.name, dict(model.identity), fs.volume.bits, free_bytes, began_s, load())

    return describe


def _host_name() -> str:
    name = socket.gethostname().partition(".")[0].lower()
    if not MACHINE_NAME.fullmatch(name):
        raise Invalid(f"the host's name {name!r} is no name for a machine: set `machine` in symphony.toml(5)")
    return name


def _bound(where: str) -> socket.socket:
    host, port = address(where)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        code = errno.EADDRNOTAVAIL if isinstance(error, socket.gaierror) else error.errno
        raise SymError(
            f"can't listen for peers at {where}: {error.strerror}; choose another peer_listen", code
        ) from None
