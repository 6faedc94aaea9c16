"""Upkeep of a fleet's versions: copies that are missing, and versions that no record names."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import trio

from libsym.errors import SymError
from symphony.fleet.etcd import has_revision, putting
from symphony.fleet.following import Follower
from symphony.fleet.membership import Membership
from symphony.fleet.mirror import Item, Mirror
from symphony.fleet.records import Keys
from symphony.fleet.versions import Draft, Versions

log = logging.getLogger(__name__)

ROUND_S, A_TURN = 60.0, 64
"""Time between two rounds, and number of files before other tasks may run."""
ABSENT_S = 300.0
"""Time after which a machine that etcd does not list is taken for lost."""


class Upkeep:
    """The upkeep that this machine does."""

    def __init__(
        self, keys: Keys, mirror: Mirror, follower: Follower, membership: Membership, versions: Versions
    ) -> None:
        self._keys, self._mirror, self._follower = keys, mirror, follower
        self._membership, self._versions = membership, versions
        self._present_s = dict[str, float]()
        """The times at which machines were last listed."""
        self._began_s = math.inf

    async def run(self) -> None:
        """Do the upkeep for ever. Without etcd, nothing is known for sure, so a round waits."""
        self._began_s = trio.current_time()
        while True:
            await trio.sleep(ROUND_S)
            if not self._follower.trouble and self._membership.lease:
                await self._collect()
                await self._copy_again()

    async def _collect(self) -> None:
        """Remove versions that no record names. Versions of another fleet stay: they may be all that is left of it."""
        for place, (ident, tag) in enumerate(self._versions.old(self._mirror.local)):
            item = self._mirror.by_ident.get(ident)
            named = () if item is None else (item.record.tag, item.draft and item.draft.tag)
            if self._mirror.owns_versions and tag not in named:
                self._versions.drop(ident, tag)
            if place % A_TURN == A_TURN - 1:
                await trio.lowlevel.checkpoint()

    async def _copy_again(self) -> None:
        """Make copies of the versions that have too few since a machine was lost. The first machine that has a version
        makes them.
        """
        self._present_s.update(dict.fromkeys(self._membership.present, trio.current_time()))
        for place, item in enumerate(tuple(self._mirror.by_ident.values())):
            there = [each for each in item.record.machines if not self._is_lost(each)]
            if there[:1] == [self._membership.name] and len(there) < min(self._versions.count, self._num_possible()):
                await self._copy(item, there)
            if place % A_TURN == A_TURN - 1:
                await trio.lowlevel.checkpoint()

    def _is_lost(self, machine: str) -> bool:
        return trio.current_time() - self._present_s.get(machine, self._began_s) > ABSENT_S

    def _num_possible(self) -> int:
        return 1 + len(self._membership.others())

    async def _copy(self, item: Item, there: list[str]) -> None:
        record, revision, key = item.record, item.revision, self._keys.inode(item.ident)
        draft = Draft(item.ident, record.tag, there)
        try:
            await self._versions.spread(draft)
            change = putting(key, replace(record, machines=tuple(draft.machines)).encoded())
            await self._follower.commit([has_revision(key, revision)], [change])
        except SymError as error:
            log.info("fleet: a version of file %s has %d copies: %s", item.ident, len(there), error)
