"""Drains of machines: a machine that should leave gets no programs and no copies, and the versions that it has are
copied to machines that stay.

A record in etcd says that a machine is drained (see `membership.py`), so a drain outlives daemons, and a machine that
is dead can be drained, too. Records of names say which machines have a version and which one may write a file.
`upkeep.py` makes copies elsewhere, and takes the machine out of these records. When no record names the machine, it can
go.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from libsym.errors import Busy, Invalid, NotFound, TimedOut
from symphony.fleet.etcd import removing
from symphony.fleet.following import Follower
from symphony.fleet.membership import HAS_LEFT, Membership
from symphony.fleet.mirror import A_TURN, Mirror
from symphony.fleet.records import Keys
from symphony.settings.kinds import MACHINE_NAME

MAX_PATHS, MAX_PATH_CHARS = 20, 200
"""Limits of the paths that an answer names."""


@dataclass(slots=True)
class Holding:
    """The files that a machine has or writes, as records say."""

    versions: int = 0
    alone: int = 0
    """Versions that no other machine has. Machines that are drained or not listed do not count."""
    stuck: int = 0
    """Versions that no other machine can copy: none of the model is listed and stays."""
    writing: int = 0
    """Files that are open for writing, or not synced."""
    paths: list[str] = field(default_factory=list)
    """Paths of some files that count as `alone` or `writing`."""


class Draining:
    """The machines of a fleet with what they hold, and changes of their state."""

    def __init__(self, keys: Keys, mirror: Mirror, follower: Follower, membership: Membership, count: int) -> None:
        """`count`: number of machines that should have a version on disk."""
        self._keys, self._mirror, self._follower, self._membership = keys, mirror, follower, membership
        self._count = count
        self.holdings: dict[str, Holding] = {}
        """Files of each machine at the last count."""
        self.num_missing = 0
        """Number of copies that were missing at the last count."""
        self._num_asked = self._num_answered = 0
        """Questions that have come, and those of them that a count has answered."""
        self._counting = trio.Lock()

    def info(self, *, has_paths: bool) -> dict[str, Any]:
        """`has_paths`: the caller may see all paths."""
        holdings = {name: asdict(each) for name, each in sorted(self.holdings.items())}
        for each in () if has_paths else holdings.values():
            each["paths"] = []
        return {"copies": self._count, "copies_missing": self.num_missing, "holdings": holdings}

    async def change(self, change: str, machine: str) -> None:
        """Change the state of a machine, unless `change` is empty, and count what all machines hold."""
        membership = self._membership
        machine = machine or membership.name
        if not self._follower.trouble:
            await self._follower.look()
        if not change:
            await self._answer()
            return
        await self.count()
        self._require_news()
        if not MACHINE_NAME.fullmatch(machine):
            raise Invalid(f"{machine!r} is no name of a machine")
        known = {*membership.present, *membership.drained}
        if machine == membership.name and machine not in known and membership.has_left:
            raise Invalid(HAS_LEFT)
        if machine not in known | self.holdings.keys():
            raise NotFound(f"the fleet has no machine {machine}: {', '.join(membership.present)} are listed")
        if change == "drain":
            if not {*membership.present} - membership.drained - {machine}:
                raise Invalid(f"no other machine stays, so {machine} can't be drained")
            await membership.drain(machine, is_on=True)
        elif change == "return":
            await membership.drain(machine, is_on=False)
        elif machine == membership.name:
            await self._leave(is_forced=change == "lose")
        else:
            await self._remove(machine, is_forced=change == "lose")
        await self.count(machine)

    async def _leave(self, *, is_forced: bool) -> None:
        """Have this machine leave. Busy: it is not drained yet."""
        membership, me = self._membership, self._membership.name
        if not is_forced and me not in membership.drained:
            raise Busy(f"{me} is not drained: symphony fleet drain, or leave --force")
        was_out, membership.has_left = membership.has_left, True  # no file is opened for writing from now on
        try:
            await self._require_free(me, is_forced=is_forced)
        except BaseException:
            membership.has_left = was_out
            raise
        await membership.leave()
        await membership.drain(me, is_on=False)

    async def _remove(self, machine: str, *, is_forced: bool) -> None:
        """Remove the records of a machine that is away. Its names in records of files stay until copies replace it."""
        if machine in self._membership.present:
            raise Busy(f"{machine} is listed, so it leaves by a command of its own: symphony fleet leave, on {machine}")
        await self._require_free(machine, is_forced=is_forced)
        await self._follower.commit([], [removing(self._keys.change(machine))])
        await self._membership.drain(machine, is_on=False)

    async def _require_free(self, machine: str, *, is_forced: bool) -> None:
        await self._follower.look()
        self._require_news()
        await self.count(machine)
        held = self.holdings.get(machine, Holding())
        if (held.alone or held.writing) and not is_forced:
            todo = "wait for its drain" if machine in self._membership.present else "it is away, so start it"
            raise Busy(
                f"{machine} has {held.alone} versions that no other machine has, and writes {held.writing} files, for "
                f"example {held.paths[0]}: {todo}, or lose them by --force"
            )

    def _require_news(self) -> None:
        if self._follower.trouble:
            raise TimedOut(f"nobody knows what machines hold now: {self._follower.trouble}")

    async def _answer(self) -> None:
        """Count what all machines hold. One count answers all questions that have come before it, since every user may
        ask, and there may be many files.
        """
        self._num_asked += 1
        mine = self._num_asked
        async with self._counting:
            if self._num_answered < mine:
                asked = self._num_asked
                await self.count()
                self._num_answered = asked

    async def count(self, asked: str = "") -> None:
        """Count what all machines hold. The paths of the machine `asked` are noted."""
        holdings, num_missing = defaultdict[str, Holding](Holding), 0
        staying_of = dict[tuple[tuple[str, str], ...], set[str]]()
        for place, item in enumerate(tuple(self._mirror.by_ident.values())):
            if place % A_TURN == A_TURN - 1:
                await trio.lowlevel.checkpoint()
            record, writer = item.record, self._mirror.writing.get(item.ident)
            if item.writers or not item.is_synced:  # also if the right to write has ended with a lease
                writer = writer or self._membership.name
            identity = tuple(record.identity.items())
            if identity not in staying_of:
                staying_of[identity] = self._membership.staying(record.identity)
            staying = staying_of[identity]
            there = staying & {*record.machines}
            num_missing += max(0, self._count - len(there)) if record.size else 0
            for name in {*record.machines, *([writer] if writer else [])}:
                held, others = holdings[name], there - {name}
                if name in record.machines:
                    held.versions += 1
                    held.alone += not others
                    held.stuck += not staying - {name}
                held.writing += name == writer
                if name == asked and (not others or name == writer) and len(held.paths) < MAX_PATHS:
                    held.paths.append(self._mirror.path_of(item)[:MAX_PATH_CHARS])
        self.holdings, self.num_missing = dict(holdings), num_missing
