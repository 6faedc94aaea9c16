"""The place of a daemon among other machines. A daemon without peers imports nothing of `symphony.fleet`."""

from __future__ import annotations

from typing import Any

from kvfs.fs import FileSystem
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.operations.fetching import NO_PEERS, Others
from scheduler.status.metrics import Metric
from symphony.settings.config import Config


class Alone:
    """A daemon without peers."""

    others: Others = NO_PEERS

    def info(self) -> dict[str, Any] | None:
        """Return the names of the peers, and counts of pages. None: the daemon has no peers."""
        return None

    def fleet(self) -> dict[str, Any] | None:
        """Return the machines of the fleet, and the state of etcd. None: the daemon is in no fleet."""
        return None

    def metrics(self) -> list[Metric]:
        """Return the metrics of the fleet. The list is empty if the daemon is in no fleet."""
        return []

    async def join(self) -> None:
        """Register in the fleet. Exists: another machine of the fleet has the name."""

    async def run(self) -> None:
        """Serve peers and stay in the fleet for ever. If there is nothing to do, return immediately."""

    async def close(self, limit_s: float) -> None:
        """Sync the files of the fleet that are open for writing here, while the daemon still has the right to."""


def peering_of(config: Config, fs: FileSystem, state: str, batches: BatchScheduler) -> Alone:
    """Read the keys, and bind the address for peers. SymError: a key or the address can't be used.

    `state`: the identity of the state directory.
    """
    if not config.peers and config.peer_listen is None and not config.etcd:
        return Alone()
    from symphony.daemon.load import LoadMeter  # noqa: PLC0415 - few daemons have peers
    from symphony.daemon.peering import Peering  # noqa: PLC0415

    return Peering(config, fs, state, batches.sync, LoadMeter(batches).read)
