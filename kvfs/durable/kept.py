"""The index as a start reads it, table by table. Every checksum is verified. The code computes with whole columns, not
row by row, so reading a hundred thousand files takes half a second.

If a row is not as it was written, `kvfs.durable.rows` checks the rows one by one, and names the damaged row.
"""

from __future__ import annotations

import logging
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Index, Row
from kvfs.durable.records import (
    CHECK_BYTES,
    ENTRY_BYTES,
    INODE,
    NAME,
    NUM_TURNS_SHIFT,
    SEE_FSCK,
    SLOT,
    VERSION,
    Broken,
    InodeRecord,
    Mark,
    SumsRecord,
    parse_marks,
    rest_of_inode,
)
from kvfs.durable.rows import MAX_SLOT, about_row, identity_row, inode_row, name_row, slot_row, sums_row, version_row
from kvfs.names.tree import ROOT_NUMBER
from kvfs.pages.free_list import IntArray
from kvfs.pages.turns import TURN
from libsym.abi import PAGE_ENTRIES

T = TypeVar("T")
log = logging.getLogger(__name__)

_64_BITS = (1 << 64) - 1
_VERSION = np.dtype([("identity", "<u4"), ("length", "<i8"), ("full_length", "<i8"), ("sizes", "<u4")])
assert _VERSION.itemsize == VERSION.size


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """All slots of one identity that the index knows, ordered by number."""

    slots: IntArray
    checks: npt.NDArray[np.uint64]
    kept: npt.NDArray[np.int8]
    tokens: IntArray
    positions: IntArray
    """Tokens and positions have the shape [slots, 32]."""

    def __len__(self) -> int:
        return self.slots.size

    def only(self, used: npt.NDArray[np.bool_]) -> KeptSlots:
        return KeptSlots(self.slots[used], self.checks[used], self.kept[used], self.tokens[used], self.positions[used])


@dataclass(frozen=True, slots=True)
class KeptVersions:
    """The versions of all KV files, in columns with one item for each version. A version has the entries that are on
    disk.
    """

    numbers: list[int]
    """Numbers of the inodes."""
    identities: IntArray
    lengths: npt.NDArray[np.int64]
    full_lengths: npt.NDArray[np.int64]
    """How many entries each file had, on disk or not."""
    marks: list[tuple[Mark, ...]]
    turns: list[bytes]
    slots: IntArray
    """Slots of all versions, in one array."""
    ends: npt.NDArray[np.intp]
    """Index in `slots` at which the slots of each version end."""

    def split(self, of_slots: IntArray) -> list[IntArray]:
        """Split an array that is as long as `slots` into one part for each version."""
        ends = self.ends.tolist()
        return [of_slots[first:end] for first, end in zip([0, *ends], ends, strict=False)]


@dataclass(slots=True)
class KeptRows:
    """The rows of the index that a start has read."""

    versions: KeptVersions
    facts: dict[int, KeptFacts] = field(default_factory=dict)
    inodes: dict[int, InodeRecord] = field(default_factory=dict)
    names: list[tuple[int, bytes, int, int]] = field(default_factory=list)
    """For each name: the directory's number, the name, the inode's number, the checksum of the row."""
    slots: dict[int, KeptSlots] = field(default_factory=dict)
    """Slots that a version needs, by identity. Other slots are free: the last daemon ended before the commit that
    removes their rows.
    """
    xattrs: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    """Attributes of domains, by inode, if the attributes have a row of their own."""
    sums: dict[int, list[SumsRecord]] = field(default_factory=dict)
    """Checksums of plain files, by inode, without damaged rows."""
    next_inode: int = 0
    uuid: str = ""
    is_damaged: bool = False
    """Whether damaged rows of the index are missing here. Bytes on disk that the missing rows may need must not be
    freed.
    """
    refused: dict[tuple[int, bytes], tuple[int, str]] = field(default_factory=dict)
    """Damaged inodes (0: unknown) and their faults, by directory and name."""
    is_root_damaged: bool = False
    refusal: str = ""
    """The reason why no commit may be made; empty: commits may be made."""
    num_unreachable: int = 0
    """Number of undamaged inodes that no undamaged name leads to."""
    held: dict[int, IntArray] = field(default_factory=dict)
    """Slots that must not be reused, by identity, because rows that are missing here may need them."""
    named_elsewhere: set[int] = field(default_factory=set)
    """Inodes of `inodes` that also have names in rows that are missing here. The rows of such an inode stay in the
    index even if the inode loses all its known names.
    """

    def take_number(self) -> int:
        """Return an unused inode number."""
        self.next_inode += 1
        return self.next_inode - 1

    def keep_needed_slots(self) -> None:
        """Keep only the slots that a version needs."""
        of_slots = np.repeat(self.versions.identities, np.diff(self.versions.ends, prepend=0))
        every, self.slots = self.slots, {}
        for identity, each in every.items():
            used = np.isin(each.slots, self.versions.slots[of_slots == identity])
            if used.any():
                self.slots[identity] = each.only(used)

    def num_slots(self, own: int) -> tuple[int, int]:
        """Return the number of slots of one identity, and the number of slots of all other identities."""
        num_own = len(self.slots.get(own, ()))
        return num_own, sum(map(len, self.slots.values())) - num_own


def read_index(index: Index) -> KeptRows:
    """Read and verify every row. Raise Broken if a row is not as it was written, or does not fit the other rows."""
    about = dict(map(about_row, index.rows("about")))
    if "uuid" not in about:
        raise Broken("its uuid is lost")
    kept = KeptRows(_table(index, "versions", _versions, version_row))
    kept.next_inode, kept.uuid = int(about.get("next_inode", "0")), about["uuid"]
    kept.facts = dict(map(identity_row, index.rows("identities")))
    kept.inodes = _table(index, "inodes", _inodes, inode_row)
    kept.names = _table(index, "names", _names, name_row)
    kept.slots = _table(index, "slots", _slots, slot_row)
    unknown = {*kept.slots, *np.unique(kept.versions.identities).tolist()} - kept.facts.keys()
    if unknown:
        raise Broken(f"the model of the slots of identity {min(unknown)} is lost")
    kept.keep_needed_slots()
    _require_fitting(kept)
    apart = [number for number, record in kept.inodes.items() if record.apart is not None]
    if lost := {*apart} - index.forget_lost_xattrs():
        raise Broken(f"the attributes of inode {min(lost)} are lost")
    for number in apart:
        if kept.inodes[number].is_domain:
            kept.xattrs[number] = index.read_xattrs(number) or {}
    kept.sums = sound_sums(index.rows("sums"))
    return kept


def sound_sums(rows: Iterable[Row]) -> dict[int, list[SumsRecord]]:
    """Return the records of checksums, by inode. Damaged rows are logged and left out."""
    found: dict[int, list[SumsRecord]] = {}
    for row in rows:
        try:
            number, record = sums_row(row)
        except Broken as error:
            log.error("%s: those bytes are not checked: %s", error, SEE_FSCK)  # noqa: TRY400 - damage, not a bug
        else:
            found.setdefault(number, []).append(record)
    return found


def misfits(versions: KeptVersions, slots: Mapping[int, KeptSlots]) -> npt.NDArray[np.intp]:
    """Return the indexes of versions that need a missing slot, or need more entries of a slot than the slot has."""
    sizes = np.diff(versions.ends, prepend=0)
    identities = np.repeat(versions.identities, sizes)
    fills = np.full(identities.size, PAGE_ENTRIES, np.int8)
    fills[versions.ends[sizes > 0] - 1] = (versions.lengths[sizes > 0] - 1) % PAGE_ENTRIES + 1
    is_held = np.zeros(identities.size, np.bool_)
    for identity, each in slots.items():
        kept = np.zeros(int(each.slots.max(initial=0)) + 1, np.int8)
        kept[each.slots] = each.kept
        mine = (identities == identity) & (versions.slots >= 0) & (versions.slots < kept.size)
        is_held[mine] = kept[versions.slots[mine]] >= fills[mine]
    return np.unique(np.searchsorted(versions.ends, np.flatnonzero(~is_held), side="right"))


def _require_fitting(kept: KeptRows) -> None:
    """Raise Broken if a row is missing that other rows need."""
    inodes, numbers = kept.inodes, {*kept.versions.numbers}
    directories = {number for number, inode in inodes.items() if inode.file_type == stat.S_IFDIR} | {ROOT_NUMBER}
    with_entries = {number for number, inode in inodes.items() if inode.has_entries}
    names = [number for _, _, number, _ in kept.names]
    named, subdirectories = {*names}, Counter([ROOT_NUMBER, *(number for number in names if number in directories)])
    lacking = {
        "it has a name and no row": named - inodes.keys(),
        "it has no name": inodes.keys() - named - {ROOT_NUMBER},
        "it has names in it, and is no directory": {directory for directory, _, _, _ in kept.names} - directories,
        "it is a directory with two names": {number for number, count in subdirectories.items() if count > 1},
        "it has entries, and its row knows nothing of them": numbers - with_entries,
        "its list of entries is lost": with_entries - numbers,
        "a row of one of its slots is lost": [
            kept.versions.numbers[each] for each in misfits(kept.versions, kept.slots).tolist()
        ],
    }
    for what, found in lacking.items():
        if found:
            raise Broken(f"inode {min(found)}: {what}")


def _table(index: Index, table: str, read: Callable[[list[Any]], T], row: Callable[[Row], object]) -> T:
    rows = index.rows(table)
    try:
        return read(rows)
    except (Broken, TypeError, ValueError, OverflowError, struct.error) as error:
        for each in rows:
            row(each)
        raise Broken(f"its table of {table} makes no sense: {error}") from error


def _inodes(rows: list[tuple[int, bytes]]) -> dict[int, InodeRecord]:
    _require_sealed(rows, INODE.size)
    begin, end = CHECK_BYTES, CHECK_BYTES + INODE.size
    firsts = INODE.iter_unpack(b"".join([data[begin:end] for _, data in rows]))
    rests = [data[end:] for _, data in rows]
    known = {rest: rest_of_inode(rest) for rest in set(rests)}
    records = [InodeRecord._make(first + known[rest]) for first, rest in zip(firsts, rests, strict=True)]
    return dict(zip([number for number, _ in rows], records, strict=True))


def _versions(rows: list[tuple[int, bytes]]) -> KeptVersions:
    _require_sealed(rows, VERSION.size)
    begin, end = CHECK_BYTES, CHECK_BYTES + VERSION.size
    found = np.frombuffer(b"".join([data[begin:end] for _, data in rows]), _VERSION)
    sizes, lengths, full_lengths = found["sizes"].astype(np.int64), found["length"], found["full_length"]
    marks_stops = (sizes & (1 << NUM_TURNS_SHIFT) - 1) + end
    stops = (marks_stops + TURN.size * (sizes >> NUM_TURNS_SHIFT)).tolist()
    parts = [(data, stop, last) for (_, data), stop, last in zip(rows, marks_stops.tolist(), stops, strict=True)]
    marks = [parse_marks(data[end:stop]) for data, stop, _ in parts]
    turns = [data[stop:last] for data, stop, last in parts]
    slots = [data[stop:] for (_, data), stop in zip(rows, stops, strict=True)]
    num_slots = -(-lengths // PAGE_ENTRIES)
    if (lengths < 0).any() or (lengths > full_lengths).any() or list(map(len, slots)) != (4 * num_slots).tolist():
        raise Broken("entries are said to be in more or fewer slots")
    return KeptVersions(
        [number for number, _ in rows],
        found["identity"].astype(np.int32),
        lengths,
        full_lengths,
        marks,
        turns,
        np.frombuffer(b"".join(slots), "<i4"),
        np.cumsum(num_slots),
    )


def _require_sealed(rows: list[tuple[int, bytes]], least_bytes: int) -> None:
    digest, begin, least = xxh3_64_digest, CHECK_BYTES, CHECK_BYTES + least_bytes
    for number, data in rows:
        if digest(data[begin:], number) != data[:begin] or len(data) < least:
            raise Broken("a checksum is wrong")


def _names(rows: list[tuple[int, bytes, int, int]]) -> list[tuple[int, bytes, int, int]]:
    digest, pack = xxh3_64_intdigest, NAME.pack
    for directory, name, number, check in rows:
        if digest(pack(directory, number) + name) != check & _64_BITS:
            raise Broken("a checksum is wrong")
    return rows


def _slots(rows: list[tuple[int, int, int, int, bytes, int]]) -> dict[int, KeptSlots]:
    digest, pack = xxh3_64_intdigest, SLOT.pack
    for identity, slot, check, num_kept, entries, row_check in rows:
        if digest(pack(identity, slot, check, num_kept) + entries) != row_check & _64_BITS:
            raise Broken("a checksum is wrong")
    if not rows:
        return {}
    columns = list(zip(*rows, strict=True))
    identities, slots, kept = (np.array(columns[each], np.int64) for each in (0, 1, 3))
    if ((slots < 0) | (slots >= MAX_SLOT) | (kept < 1) | (kept > PAGE_ENTRIES)).any():
        raise Broken("there can't be such a slot")
    if set(map(len, columns[4])) != {ENTRY_BYTES}:
        raise Broken("a slot has too many entries or too few")
    checks = np.array(columns[2], np.int64).view(np.uint64)
    texts = np.frombuffer(b"".join(columns[4]), "<i4").reshape(len(rows), 2, PAGE_ENTRIES)
    every = KeptSlots(slots.astype(np.int32), checks, kept.astype(np.int8), texts[:, 0], texts[:, 1])
    return {identity: every.only(identities == identity) for identity in np.unique(identities).tolist()}
