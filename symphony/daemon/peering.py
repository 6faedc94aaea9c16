"""The peers of a daemon: daemons on other machines with which it exchanges files."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from kvfs.fs import FileSystem
from libsym.errors import SymError
from scheduler.operations.fetching import NO_PEERS, Fetcher
from symphony.fleet.client import Peers
from symphony.fleet.link import contexts
from symphony.fleet.server import PeerServer
from symphony.settings.config import Config
from symphony.settings.kinds import address


class Peering:
    """The daemon's connections with its peers."""

    def __init__(self, config: Config, fs: FileSystem, catch_up: Callable[[], None]) -> None:
        """Read the keys, and bind the address for peers. SymError: a key or the address can't be used."""
        self.fetcher: Fetcher = NO_PEERS
        self._peers: Peers | None = None
        self._server: PeerServer | None = None
        if not config.peers and config.peer_listen is None:
            return
        for_server, for_client = contexts(config.peer_keys or config.state / "peers")
        named = (each.partition("=") for each in config.peers)
        self.fetcher = self._peers = Peers(fs, {name: address(where) for name, _, where in named}, for_client)
        if config.peer_listen is not None:
            self._server = PeerServer(fs, for_server, _bound(config.peer_listen), catch_up)

    def info(self) -> dict[str, Any] | None:
        """Return the names of the peers, and counts of pages. None: the daemon has no peers."""
        if self._peers is None:
            return None
        sent = 0 if self._server is None else self._server.num_pages_sent
        return {"names": self._peers.names, "pages_received": self._peers.num_pages_received, "pages_sent": sent}

    async def run(self) -> None:
        """Serve peers for ever. If peers may not fetch files, return immediately."""
        if self._server is not None:
            await self._server.run()


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
