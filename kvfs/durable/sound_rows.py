"""The sound rows of a salvaged index. A sound row is as it was written. Of a damaged row, only the key is kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Row
from kvfs.durable.records import Broken, InodeRecord, SlotRecord, SumsRecord, VersionRecord
from kvfs.durable.rows import about_row, identity_row, inode_row, name_row, slot_row, sums_row, version_row, xattrs_row
from kvfs.durable.salvage import TABLES, Salvage
from kvfs.names.inode import XattrSums
from kvfs.pages.free_list import IntArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Sound rows of one identity's slots, without tokens and positions, ordered by slot."""

    slots: IntArray
    checks: npt.NDArray[np.uint64]
    kept: npt.NDArray[np.int8]

    def find(self, slots: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the index of each slot's row, and whether the slot has a row."""
        if not self.slots.size:
            return np.zeros(slots.size, np.intp), np.zeros(slots.size, np.bool_)
        at = np.minimum(np.searchsorted(self.slots, slots), self.slots.size - 1)
        return at, self.slots[at] == slots


NO_SLOTS = SlotRows(np.empty(0, np.int32), np.empty(0, np.uint64), np.empty(0, np.int8))


@dataclass(slots=True)
class SoundRows:
    """Sound rows of an index, by key. If a damaged table has a key twice, the first row counts."""

    about: dict[str, str] = field(default_factory=dict)
    facts: dict[int, KeptFacts] = field(default_factory=dict)
    inodes: dict[int, InodeRecord] = field(default_factory=dict)
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    names: dict[tuple[int, bytes], int] = field(default_factory=dict)
    slots: dict[int, SlotRows] = field(default_factory=dict)
    xattrs: dict[int, XattrSums] = field(default_factory=dict)
    """Count and bytes of attributes that have a row of their own, by inode."""
    sums: dict[tuple[int, int], SumsRecord] = field(default_factory=dict)
    """Sums by inode and part."""
    broken: dict[str, list[Row]] = field(default_factory=dict)
    """Keys of rows with wrong checksums, by table."""


def sound_rows(salvage: Salvage) -> SoundRows:
    """Read all sound rows of an index, except for the tokens of slots and the large attributes."""
    found = SoundRows()
    for key, value in _verified(salvage, "about", about_row, found):
        found.about.setdefault(key, value)
    for identity, facts in _verified(salvage, "identities", identity_row, found):
        found.facts.setdefault(identity, facts)
    for number, inode in _verified(salvage, "inodes", inode_row, found):
        found.inodes.setdefault(number, inode)
    for number, version in _verified(salvage, "versions", version_row, found):
        found.versions.setdefault(number, version)
    for directory, name, number in _verified(salvage, "names", name_row, found):
        found.names.setdefault((directory, name), number)
    for number, xattrs in xattrs_rows(salvage, found):
        found.xattrs.setdefault(number, XattrSums.of(xattrs))
    for number, sums in _verified(salvage, "sums", sums_row, found):
        found.sums.setdefault((number, sums.part), sums)
    slots: dict[int, tuple[array[int], array[int], array[int]]] = {}
    for identity, record in slot_records(salvage, found):
        numbers, checks, kept = slots.setdefault(identity, (array("i"), array("Q"), array("b")))
        numbers.append(record.slot)
        checks.append(record.check)
        kept.append(record.kept)
    found.slots = {identity: _slot_rows(*columns) for identity, columns in slots.items()}
    return found


def slot_records(salvage: Salvage, found: SoundRows) -> Iterator[tuple[int, SlotRecord]]:
    """Yield the sound rows of slots, including tokens."""
    return _verified(salvage, "slots", slot_row, found)


def xattrs_rows(salvage: Salvage, found: SoundRows) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Yield the sound rows of attributes."""
    return _verified(salvage, "xattrs", xattrs_row, found)


def _verified(salvage: Salvage, table: str, decode: Callable[[Row], T], found: SoundRows) -> Iterator[T]:
    for row in salvage.rows(table):
        try:
            yield decode(row)
        except Broken:
            key = row[: TABLES[table].num_key_columns]
            found.broken.setdefault(table, []).append(key)


def _slot_rows(slots: array[int], checks: array[int], kept: array[int]) -> SlotRows:
    distinct, first = np.unique(np.frombuffer(slots, np.int32), return_index=True)
    return SlotRows(distinct, np.frombuffer(checks, np.uint64)[first], np.frombuffer(kept, np.int8)[first])
