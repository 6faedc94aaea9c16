"""Upkeep of a fleet's versions: copies that are missing, and versions that no record names."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import trio

from libsym.errors import SymError
from symphony.fleet.draining import Draining
from symphony.fleet.etcd import has_revision, putting
from symphony.fleet.following import Follower
from symphony.fleet.link import Copy
from symphony.fleet.membership import Membership
from symphony.fleet.mirror import A_TURN, Item, Mirror
from symphony.fleet.records import Keys
from symphony.fleet.versions import Draft, Versions

log = logging.getLogger(__name__)

ROUND_S, DRAIN_S = 60.0, 1.0
"""Time between two rounds, and between two looks for versions of machines that are drained."""
ABSENT_S = 300.0
"""Time after which a machine that etcd does not list is taken for lost."""


class Upkeep:
    """The upkeep that this machine does."""

    def __init__(
        self,
        keys: Keys,
        mirror: Mirror,
        follower: Follower,
        membership: Membership,
        versions: Versions,
        draining: Draining,
    ) -> None:
        self._keys, self._mirror, self._follower, self._draining = keys, mirror, follower, draining
        self._membership, self._versions = membership, versions
        self._present_s = dict[str, float]()
        """The times at which machines were last listed."""
        self._began_s = math.inf

    async def run(self) -> None:
        """Do the upkeep for ever. Without etcd, nothing is known for sure, so a round waits."""
        self._began_s = round_s = trio.current_time()
        drained, is_draining = self._membership.drained, True
        while True:
            await trio.sleep(min(ROUND_S, DRAIN_S))
            if not self._follower.trouble and self._membership.lease:
                is_round = trio.current_time() - round_s >= ROUND_S
                if is_round:
                    round_s = trio.current_time()
                    await self._collect()
                    await self._draining.count()
                if is_round or is_draining or drained != self._membership.drained:
                    drained = self._membership.drained
                    is_draining = await self._copy_again(drained)

    async def _collect(self) -> None:
        """Remove versions that no record names. Versions of another fleet stay: they may be all that is left of it."""
        for place, (ident, tag) in enumerate(self._versions.old(self._mirror.local)):
            item = self._mirror.by_ident.get(ident)
            named = () if item is None else (item.record.tag, item.draft and item.draft.tag)
            if self._mirror.owns_versions and tag not in named:
                self._versions.drop(ident, tag)
            if place % A_TURN == A_TURN - 1:
                await trio.lowlevel.checkpoint()

    async def _copy_again(self, drained: frozenset[str]) -> bool:
        """Make copies of the versions that have too few, since a machine was lost or is drained, and take drained
        machines out of the records. The first machine that has a version does so. If none has it, a machine does that
        has fetched it. Return whether a record names a drained machine.
        """
        is_draining, me = False, self._membership.name
        self._present_s.update(dict.fromkeys(self._membership.present, trio.current_time()))
        for place, item in enumerate(tuple(self._mirror.by_ident.values())):
            record = item.record
            there = [each for each in record.machines if not self._is_lost(each)]
            staying = [each for each in there if each not in drained]
            names_drained = not drained.isdisjoint(record.machines)
            is_draining |= names_drained
            if record.size and (staying + there or [me])[0] == me and self._versions.is_here(item.version):
                count = min(self._versions.count, self._num_possible())
                if len(staying) < count or (count and names_drained):
                    await self._copy(item, staying, count)
            if place % A_TURN == A_TURN - 1:
                await trio.lowlevel.checkpoint()
        return is_draining

    def _is_lost(self, machine: str) -> bool:
        if machine in self._membership.drained and machine not in self._membership.present:
            return True
        return trio.current_time() - self._present_s.get(machine, self._began_s) > ABSENT_S

    def _num_possible(self) -> int:
        return len({*self._membership.others(), self._membership.name} - self._membership.drained)

    async def _copy(self, item: Item, there: list[str], count: int) -> None:
        """`there`: machines that stay and have the version. `count`: number of machines that should have it."""
        record, revision, key, me = item.record, item.revision, self._keys.inode(item.ident), self._membership.name
        try:
            if me not in record.machines:
                await self._versions.keep(Copy(item.version, me))
                there = [me]
            draft = Draft(item.ident, record.tag, there)
            await self._versions.spread(draft, count)
            change = putting(key, replace(record, machines=tuple(draft.machines)).encoded())
            await self._follower.commit([has_revision(key, revision)], [change])
        except SymError as error:
            log.info("fleet: a version of file %s has %d copies: %s", item.ident, len(there), error)
