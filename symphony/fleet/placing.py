"""Finds the machine of a fleet on which a program should run, and says why.

This module gathers what a machine knows about the others, and `placement.py` chooses. The records of machines in etcd
have their loads. The records of names have the machines that had a file's version when it was synced. Other machines
may have fetched the version since, so the best machines are asked.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import randbits
from typing import Any

import numpy as np
import trio

from kvfs.fs import FileSystem
from kvfs.names.agreement import when_settled
from kvfs.names.content import KvFile
from kvfs.names.inode import READ, Credentials, Inode, require
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, SymError
from symphony.fleet.client import Peers
from symphony.fleet.link import MAX_HELD, Held
from symphony.fleet.membership import Load, Machine, Membership
from symphony.fleet.names import FleetNames
from symphony.fleet.placement import TABLE, ProgramNeeds, Table, choose
from symphony.fleet.records import NameRecord
from symphony.fleet.versions import entries_here

log = logging.getLogger(__name__)

PLACED_S = 8.0
"""Time for which a program that was placed is added to the load of its machine. Then the machine's record shows it."""
NUM_ASKED, ASK_S = 8, 1.0
"""Maximum number of machines that are asked what they have, and the time that they get."""


@dataclass(slots=True)
class _Files:
    """The files of a program."""

    versions: dict[str, NameRecord] = field(default_factory=dict)
    """Files of the fleet by version, which is IDENT.TAG."""
    only_here: list[str] = field(default_factory=list)
    """Paths of files that only this machine has."""
    num_local: int = 0
    """Entries of the files of this machine."""

    @property
    def num_entries(self) -> int:
        return self.num_local + sum(each.num_entries for each in self.versions.values())


class Placer:
    """Chooses machines for the programs of one machine."""

    def __init__(self, fs: FileSystem, membership: Membership, names: FleetNames, peers: Peers) -> None:
        self._fs, self._membership, self._names, self._peers = fs, membership, names, peers
        self._placed = deque[tuple[float, str]]()

    async def place(self, creds: Credentials, paths: Sequence[str], *, begins: bool) -> dict[str, Any]:
        """Return the machine for a program that uses these files, the reason, and the facts about all machines.

        `begins`: the program will begin there, so later choices count it. NoAccess: the user may not read a file.
        """
        if creds.root is not None:
            raise Invalid("a connection that is confined to a domain can't ask about the fleet")
        if len(paths) > MAX_HELD:
            raise Invalid(f"{len(paths)} files: a program is placed by at most {MAX_HELD} files")
        files = await self._files(creds, paths)
        machines = dict(sorted(self._membership.machines().items()))
        names = [*machines]
        refusals = self._refusals(machines, files)
        held = self._known(machines, files)
        table = self._table(machines, refusals)
        wanted = ProgramNeeds(files.num_entries, self._fs.pool.page_bytes // PAGE_ENTRIES, randbits(32))
        await self._ask(table, wanted, names, held, files)
        table["held"] = [held[name] for name in names]
        choice = choose(table, wanted)
        if choice.row < 0:
            why = "; ".join(f"{name}: {refusals[name]}" for name in names)
            raise SymError(f"no machine of the fleet can run the program ({why})", errno.EHOSTUNREACH)
        name = names[choice.row]
        if begins:
            self._placed.append((trio.current_time(), name))
        return {
            "machine": name,
            "here": self._membership.name,
            "reason": _reason(name, held, files),
            "entries": files.num_entries,
            "machines": {
                each: _facts(machines[each], held[each], refusals[each], float(choice.delays_s[row]))
                for row, each in enumerate(names)
            },
        }

    # ---- the files

    async def _files(self, creds: Credentials, paths: Sequence[str]) -> _Files:
        """Find the files. NotFound, NoAccess: a file is not there, or the user may not read it."""
        found = _Files()
        for path in paths:
            inode = await when_settled(partial(self._find, creds, path))
            version = self._names.version_of(inode)
            if version is None:
                found.only_here.append(path)
                found.num_local += inode.content.table.length if isinstance(inode.content, KvFile) else 0
            elif version[1].size:
                found.versions[version[0]] = version[1]
        return found

    async def _find(self, creds: Credentials, path: str) -> Inode:
        tree, inode = self._fs.volume.tree, self._fs.find(creds, path)
        if inode.is_directory:
            raise Invalid(f"{path} is a directory: name the files of the program")
        for directory, _ in inode.names:
            tree.require_fresh(tree.get(directory))
        require(inode, creds, READ, path)
        return inode

    # ---- the machines

    def _refusals(self, machines: dict[str, Machine], files: _Files) -> dict[str, str]:
        """Return for each machine why the program can't run there. Empty: it can."""
        mine = machines[self._membership.name].identity
        identities = [each.identity for each in files.versions.values()] or [mine]

        def refusal(name: str, machine: Machine) -> str:
            if files.only_here and name != self._membership.name:
                return f"{files.only_here[0]} is a file of {self._membership.name} alone"
            if name in self._membership.drained:
                return "it is drained"
            if machine.load is None:
                return "its daemon is of an earlier release"
            return "" if all(each == machine.identity for each in identities) else "another model"

        return {name: refusal(name, machine) for name, machine in machines.items()}

    def _known(self, machines: dict[str, Machine], files: _Files) -> Counter[str]:
        """Return the entries of the files that each machine is known to have."""
        held, mine = Counter[str](), self._membership.name
        for version, record in files.versions.items():
            for name in {*record.machines} - {mine}:
                held[name] += record.num_entries
            held[mine] += entries_here(self._fs, version)
        held[mine] += files.num_local
        return Counter({name: held[name] for name in machines})

    def _table(self, machines: dict[str, Machine], refusals: dict[str, str]) -> Table:
        now_s = trio.current_time()
        while self._placed and self._placed[0][0] < now_s - PLACED_S:
            self._placed.popleft()
        placed = Counter(name for _, name in self._placed)
        table = np.zeros(len(machines), TABLE)
        for row, (name, machine) in enumerate(machines.items()):
            load = machine.load or Load(0, 0, 0, 0)
            seconds = (each * 1e-6 for each in (load.step_us, load.row_us, load.backlog_us))
            table[row] = (not refusals[name], 0, machine.free_bytes, *seconds, placed[name])
        return table

    async def _ask(
        self, table: Table, wanted: ProgramNeeds, names: list[str], held: Counter[str], files: _Files
    ) -> None:
        """Ask the machines that would be best if they had all files what they have, and note it in `held`."""
        if not files.versions:
            return
        table["held"] = wanted.num_entries
        best = np.argsort(choose(table, wanted).delays_s, kind="stable")
        asked = [names[row] for row in best if table["can"][row] and held[names[row]] < wanted.num_entries]
        with trio.move_on_after(ASK_S):
            async with trio.open_nursery() as nursery:
                for name in [each for each in asked if each != self._membership.name][:NUM_ASKED]:
                    nursery.start_soon(self._ask_one, name, held, files)

    async def _ask_one(self, name: str, held: Counter[str], files: _Files) -> None:
        """Ask a machine. If it does not answer, what its record and the files' records say counts."""
        try:
            answer = await self._peers.held(name, Held([*files.versions]))
        except SymError as error:
            log.info("%s did not say which files it has: %s", name, error)
            return
        records = files.versions.values()
        held[name] = sum(min(each, record.num_entries) for each, record in zip(answer, records, strict=True))


def _reason(name: str, held: Counter[str], files: _Files) -> str:
    """Say why a machine was chosen."""
    total = files.num_entries
    if files.only_here:
        return f"{files.only_here[0]} is a file of this machine alone"
    if not total:
        return "its load is among the least"
    if held[name] >= total:
        return f"all {total:,} entries of the files are there"
    where = f"{held[name]:,} of {total:,} entries of the files are there"
    if held[name] >= max(held.values()):
        return where
    return f"{where}, and machines with more of them have more load or no memory"


def _facts(machine: Machine, held: int, refusal: str, delay_s: float) -> dict[str, Any]:
    """Return what `symphony fleet place` shows of a machine."""
    return {
        "entries": held,
        "free_bytes": machine.free_bytes,
        "calls": None if machine.load is None else machine.load.calls,
        "delay_s": None if refusal else round(delay_s, 4),
        "refusal": refusal,
    }
