"""Survey of slots for fsck: reads the slots that files need, and finds damaged slots and damaged slot files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvfs.durable.findings import Progress
from kvfs.durable.identity import KeptFacts
from kvfs.durable.slot_file import SLOTS_A_JOB, SUPERBLOCK_BYTES, SlotFile, disk_error, slot_bytes_of
from kvfs.durable.sound_rows import NO_SLOTS, SlotRows, SoundRows
from kvfs.durable.superblock import Superblock, read_superblock, superblock
from kvfs.pages.free_list import IntArray

_READERS = 3
"""Number of threads. One thread computes checksums while the others wait for the disk."""


@dataclass(slots=True)
class SlotSurvey:
    """Findings of fsck on the slot file of one identity."""

    is_missing: bool = False
    is_misnamed: bool = False
    """Whether the superblock differs from the index."""
    num_slots: int = 0
    """Number of slots that the file has room for."""
    bad: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots whose bytes are not as written, and slots beyond the end of the file."""
    num_read: int = 0


def uuid_of(directory: Path) -> str | None:
    """Return the uuid of the index from the superblocks of the slot files, or None if no superblock is readable."""
    found = {block.state for block in _superblocks(directory).values()}
    return min(found) if found else None


def facts_in_slot_files(directory: Path, uuid: str | None) -> dict[int, KeptFacts]:
    """Return the facts of the pages in a state's slot files, by identity, from the superblocks."""
    blocks = _superblocks(directory)
    return {number: block.facts for number, block in blocks.items() if block.identity == number and block.state == uuid}


def _superblocks(directory: Path) -> dict[int, Superblock]:
    """Return the readable superblocks, by the number in the file's name."""
    found: dict[int, Superblock] = {}
    for path in (directory / "slots").glob("*.kv"):
        block = read_superblock(path) if path.stem.isdecimal() and path.is_file() else None
        if block is not None:
            found[int(path.stem)] = block
    return found


def survey_slots(
    directory: Path, uuid: str, facts: Mapping[int, KeptFacts], rows: SoundRows, progress: Progress, *, quick: bool
) -> dict[int, SlotSurvey]:
    """Read the slots that files need, identity by identity. `quick`: check only superblocks and the sizes of slot
    files.
    """
    needed = {identity: _needed(identity, rows) for identity in facts}
    tables = {identity: rows.slots.get(identity, NO_SLOTS) for identity in facts}
    total = sum(needed[identity].size * slot_bytes_of(facts[identity].page_bytes) for identity in facts)
    found: dict[int, SlotSurvey] = {}
    done = 0
    for identity, of in facts.items():
        found[identity] = survey = _look_at(directory / "slots" / f"{identity}.kv", superblock(uuid, identity, of), of)
        if survey.is_missing:
            survey.bad = needed[identity]
            continue
        is_behind = needed[identity] >= survey.num_slots
        if quick:
            survey.bad = needed[identity][is_behind]
            continue
        table, to_read = tables[identity], needed[identity][~is_behind]
        bad = [needed[identity][is_behind]]
        file = SlotFile(directory / "slots" / f"{identity}.kv", of.page_bytes, read_only=True)
        try:
            groups = [to_read[first : first + SLOTS_A_JOB] for first in range(0, to_read.size, SLOTS_A_JOB)]
            with ThreadPoolExecutor(_READERS) as readers:
                for group, damaged in zip(groups, readers.map(partial(_damaged, file, table), groups), strict=True):
                    bad.append(damaged)
                    done += group.size * file.slot_bytes
                    progress(done, total)
        finally:
            file.close()
        survey.bad, survey.num_read = np.concatenate(bad), int(to_read.size)
    return found


def _needed(identity: int, rows: SoundRows) -> IntArray:
    """Return the slots that files need and that have a row, in ascending order."""
    lists = [version.slots for version in rows.versions.values() if version.identity == identity]
    slots = np.unique(np.concatenate(lists)) if lists else np.empty(0, np.int32)
    _, is_known = rows.slots.get(identity, NO_SLOTS).find(slots)
    found: IntArray = slots[is_known]
    return found


def _look_at(path: Path, block: bytes, facts: KeptFacts) -> SlotSurvey:
    try:
        with path.open("rb") as file:
            is_misnamed = file.read(len(block)) != block
        size = path.stat().st_size
    except FileNotFoundError:
        return SlotSurvey(is_missing=True)
    except OSError as error:
        raise disk_error("read", path, error) from error
    return SlotSurvey(
        is_misnamed=is_misnamed, num_slots=max(0, size - SUPERBLOCK_BYTES) // slot_bytes_of(facts.page_bytes)
    )


def _damaged(file: SlotFile, table: SlotRows, slots: IntArray) -> IntArray:
    at, _ = table.find(slots)
    try:
        return np.array(file.verify(slots.tolist(), table.checks[at].tolist()), np.int32)
    except OSError as error:
        raise disk_error("read", file.path, error) from error
