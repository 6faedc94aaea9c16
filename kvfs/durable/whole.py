"""The whole part of a damaged index: rows that are as they were written, and that fit together.

A start reads this part when `kvfs.durable.kept` finds damage. Names that lead to other rows are refused with EIO.
This module mends and removes no row, so a later fsck finds all the damage.
"""

from __future__ import annotations

import stat
import uuid
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvfs.durable.index import Index
from kvfs.durable.kept import KeptRows, KeptSlots, KeptVersions, misfits, sound_sums
from kvfs.durable.records import InodeRecord, SlotRecord, VersionRecord
from kvfs.durable.salvage import Salvage
from kvfs.durable.slot_survey import facts_in_slot_files, uuid_of
from kvfs.durable.sound_rows import SoundRows, slot_records, sound_rows
from kvfs.names.plain import backing_files
from kvfs.names.tree import ROOT_NUMBER, is_possible_name
from kvfs.pages.free_list import IntArray
from libsym.abi import PAGE_ENTRIES


def read_damaged_index(directory: Path, index: Index) -> KeptRows:
    """Return the rows that a daemon may serve, and the names that it has to refuse."""
    problems = index.problems()
    kept = _Whole(directory, Salvage(index.for_salvage(), problems, lost_commits=False)).kept(index)
    if problems:
        kept.refusal = "nothing is kept, because pages of the index itself are damaged"
        index.refuse_commits(f"pages of the index are damaged ({problems[0].splitlines()[0]})")
    return kept


class _Whole:
    """Sorts the sound rows into rows that fit together and rows that lack something."""

    def __init__(self, directory: Path, salvage: Salvage) -> None:
        self._directory = directory
        self._rows = rows = sound_rows(salvage)
        self._sums = sound_sums(salvage.rows("sums"))
        self._uuid = rows.about.get("uuid") or uuid_of(directory) or str(uuid.uuid4())
        self._slots = _slots(slot_records(salvage, SoundRows()))
        self._broken = {table: {key[0] for key in keys} for table, keys in rows.broken.items()}
        needed = {version.identity for version in rows.versions.values()} | {*rows.slots, *self._numbers("identities")}
        on_disk = facts_in_slot_files(directory, self._uuid)
        self._facts = {each: facts for each, facts in on_disk.items() if each in needed} | rows.facts
        self._why = dict.fromkeys(self._numbers("inodes"), "its row is damaged")
        self._names: list[tuple[int, bytes, int, int]] = []
        self._refused: dict[tuple[int, bytes], tuple[int, str]] = {}
        self._reached: dict[int, InodeRecord] = {}

    def kept(self, index: Index) -> KeptRows:
        rows = self._rows
        self._find_wrong_versions()
        self._find_wrong_inodes()
        self._walk()
        versions = _versions({each: rows.versions[each] for each in self._reached if each in rows.versions})
        kept = KeptRows(
            versions, self._facts, self._reached, self._names, next_inode=self._next_inode(), uuid=self._uuid
        )
        kept.slots = self._slots
        kept.sums = self._sums
        kept.keep_needed_slots()
        kept.held = self._held_slots(kept)
        kept.named_elsewhere = self._named_elsewhere()
        kept.xattrs = {
            number: index.xattrs(number) or {}
            for number, inode in self._reached.items()
            if inode.is_domain and inode.apart is not None
        }
        kept.refused = self._refused
        kept.is_damaged = True
        kept.is_root_damaged = ROOT_NUMBER in self._why
        kept.num_unreachable = len({*rows.inodes, *rows.versions} - {*self._reached, *self._why})
        return kept

    def _numbers(self, table: str) -> Iterable[int]:
        return [number for number in self._broken.get(table, ()) if isinstance(number, int)]

    def _find_wrong_versions(self) -> None:
        rows, why = self._rows, self._why
        for number in self._numbers("versions"):
            why.setdefault(number, "its list of entries is damaged")
        for number, record in rows.inodes.items():
            if record.has_entries and number not in rows.versions:
                why.setdefault(number, "its list of entries is lost")
        for number, version in rows.versions.items():
            inode = rows.inodes.get(number)
            if version.identity not in self._facts:
                why.setdefault(number, "the model of its entries is unknown")
            elif inode is not None and not (stat.S_ISREG(inode.file_type) and inode.has_entries and inode.backing < 0):
                why.setdefault(number, "its row does not say that it has entries")
        versions = _versions(rows.versions)
        for place in misfits(versions, self._slots).tolist():
            why.setdefault(versions.numbers[place], "a row of one of its slots is damaged or lost")

    def _find_wrong_inodes(self) -> None:
        for number, inode in self._rows.inodes.items():
            if inode.is_domain and inode.apart is not None and inode.apart != self._rows.xattrs.get(number):
                self._why.setdefault(number, "its attributes' row is damaged or lost")

    def _walk(self) -> None:
        """Walk from the root. Divide the names into names that lead to whole inodes, and names to refuse."""
        rows = self._rows
        below: dict[int, list[tuple[bytes, int]]] = {}
        for (directory, name), number in rows.names.items():
            below.setdefault(directory, []).append((name, number))
        for place, text in rows.broken.get("names", ()):
            if not isinstance(place, int) or not isinstance(text, bytes) or (place, text) in rows.names:
                continue
            if is_possible_name(place, text):
                below.setdefault(place, []).append((text, 0))
        if ROOT_NUMBER in rows.inodes and ROOT_NUMBER not in self._why:
            self._reached[ROOT_NUMBER] = rows.inodes[ROOT_NUMBER]
        waiting, directories = deque([ROOT_NUMBER]), {ROOT_NUMBER}
        while waiting:
            directory = waiting.popleft()
            for name, number in below.get(directory, ()):
                inode = rows.inodes.get(number)
                why = self._why_not(number, inode, directories)
                if why or inode is None:
                    self._refused[directory, name] = 0 if number in directories else number, why
                    continue
                self._names.append((directory, name, number, 0))
                self._reached[number] = inode
                if stat.S_ISDIR(inode.file_type):
                    directories.add(number)
                    waiting.append(number)

    def _why_not(self, number: int, inode: InodeRecord | None, directories: set[int]) -> str:
        if not number:
            return "the name's row is damaged"
        if number in self._why:
            return self._why[number]
        if inode is None:
            return "its row is lost"
        return "it is a second name of a directory" if number in directories else ""

    def _held_slots(self, kept: KeptRows) -> dict[int, IntArray]:
        """Return the slots to hold: slots of files that are refused or unreachable, and slots with a row that no served
        file needs.
        """
        found: dict[int, list[IntArray]] = {}
        for identity, each in self._slots.items():
            served = kept.slots[identity].slots if identity in kept.slots else each.slots[:0]
            found[identity] = [np.setdiff1d(each.slots, served)]
        for number, version in self._rows.versions.items():
            if number not in self._reached:
                found.setdefault(version.identity, []).append(version.slots)
        return {each: np.unique(np.concatenate(slots)) for each, slots in found.items() if each in self._facts}

    def _named_elsewhere(self) -> set[int]:
        """Return the served inodes that also have a name that is not served."""
        served = {(directory, name) for directory, name, _, _ in self._names}
        return {number for place, number in self._rows.names.items() if place not in served} & self._reached.keys()

    def _next_inode(self) -> int:
        """Return a number greater than every inode number in rows and in names of backing files."""
        told, rows = self._rows.about.get("next_inode", ""), self._rows
        backing = [each.inode for each in backing_files(self._directory / "files")]
        tables = (rows.inodes, rows.versions, rows.xattrs, rows.names.values(), backing)
        known = max(max(table, default=0) for table in tables)
        return max(int(told) if told.isdecimal() else 0, known + 1, ROOT_NUMBER + 1)


def _slots(records: Iterable[tuple[int, SlotRecord]]) -> dict[int, KeptSlots]:
    """Return the slots of each identity. In a damaged index a row may occur twice, and then both copies are equal."""
    by_identity: dict[int, dict[int, SlotRecord]] = {}
    for identity, record in records:
        by_identity.setdefault(identity, {})[record.slot] = record
    return {identity: _slots_of(found) for identity, found in by_identity.items()}


def _slots_of(found: dict[int, SlotRecord]) -> KeptSlots:
    every = [found[slot] for slot in sorted(found)]
    texts = np.frombuffer(b"".join([each.entries for each in every]), "<i4").reshape(len(every), 2, PAGE_ENTRIES)
    return KeptSlots(
        np.array([each.slot for each in every], np.int32),
        np.array([each.check for each in every], np.uint64),
        np.array([each.kept for each in every], np.int8),
        texts[:, 0],
        texts[:, 1],
    )


def _versions(found: dict[int, VersionRecord]) -> KeptVersions:
    every = list(found.values())
    return KeptVersions(
        list(found),
        np.array([each.identity for each in every], np.int32),
        np.array([each.length for each in every], np.int64),
        np.array([each.full_length for each in every], np.int64),
        [each.marks for each in every],
        [each.turns for each in every],
        np.concatenate([np.empty(0, np.int32), *(each.slots for each in every)]).astype(np.int32),
        np.cumsum(np.array([each.slots.size for each in every], np.intp)),
    )
