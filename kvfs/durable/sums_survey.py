"""Survey of plain files for fsck: reads bytes that have checksums, and finds bytes that differ from the synced
bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvfs.durable.findings import Progress, listed
from kvfs.durable.records import SumsRecord
from kvfs.durable.slot_file import disk_error
from kvfs.names.plain import Backing
from kvfs.names.sums import EXTENT_BYTES, PART_EXTENTS, UNCHECKED, num_extents, sum_of


@dataclass(slots=True)
class SumsSurvey:
    """Descriptions of damaged backing files, and the rows of sums that changed because of the damage."""

    damage: dict[Backing, str] = field(default_factory=dict)
    mended: dict[tuple[int, int], SumsRecord | None] = field(default_factory=dict)
    """Changed rows, by inode and part; None: the part has no bytes left."""
    num_bytes: int = 0
    """Number of bytes read."""


def survey_sums(
    directory: Path, rows: Mapping[tuple[int, int], SumsRecord], progress: Progress, *, quick: bool
) -> SumsSurvey:
    """Read the backing files in a directory. `quick`: only their sizes are checked."""
    survey = SumsSurvey()
    parts: dict[Backing, list[SumsRecord]] = {}
    for (number, _), record in sorted(rows.items(), key=lambda row: row[0]):
        parts.setdefault(Backing(number, record.backing), []).append(record)
    total = 0 if quick else sum(record.num_bytes for record in rows.values())
    for backing, records in parts.items():
        path = directory / backing.name
        try:
            if not path.exists():
                continue  # fsck reports a missing file separately, or the inode has another backing file by now
            with path.open("rb") as file:
                damage = [*_damage(file, backing, records, survey, quick=quick)]
        except OSError as error:
            raise disk_error("read", path, error) from error
        survey.num_bytes += 0 if quick else sum(record.num_bytes for record in records)
        progress(survey.num_bytes, total)
        if damage:
            survey.damage[backing] = f"damaged on disk: {listed(damage)}"
    return survey


def _damage(
    file: BinaryIO, backing: Backing, records: list[SumsRecord], survey: SumsSurvey, *, quick: bool
) -> Iterator[str]:
    """Yield descriptions of the damage of a backing file."""
    last = records[-1]
    size, synced = file.seek(0, 2), _start(last) + last.num_bytes
    if size < synced:
        yield f"{size} of the {synced} bytes that were synced are left"
    begin = end = 0
    for record in records:
        whole = _within(record, size)
        bad = [] if quick or whole is None else [*_bad(file, whole)]
        if bad and whole is not None:
            whole = whole._replace(sums=array("Q", whole.sums))
            for extent in bad:
                whole.sums[extent] = UNCHECKED
        if whole != record:
            survey.mended[backing.inode, record.part] = whole
        for extent in bad:
            start = _start(record) + extent * EXTENT_BYTES
            if start != end and begin < end:
                yield f"bytes {begin} to {end} are not as they were synced"
            begin, end = (begin if start == end else start), min(start + EXTENT_BYTES, synced)
    if begin < end:
        yield f"bytes {begin} to {end} are not as they were synced"


def _start(record: SumsRecord) -> int:
    return record.part * PART_EXTENTS * EXTENT_BYTES


def _within(record: SumsRecord, size: int) -> SumsRecord | None:
    """Return a row shortened to a file of this size, or None if the file ends before the row's part."""
    num_bytes = min(record.num_bytes, size - _start(record))
    if num_bytes == record.num_bytes:
        return record
    if num_bytes <= 0:
        return None
    sums = record.sums[: num_extents(num_bytes)]
    sums[-1] = UNCHECKED
    return record._replace(num_bytes=num_bytes, sums=sums)


def _bad(file: BinaryIO, record: SumsRecord) -> Iterator[int]:
    """Yield the extents of a part whose bytes do not match their sums."""
    for extent, value in enumerate(record.sums):
        if value == UNCHECKED:
            continue
        file.seek(_start(record) + extent * EXTENT_BYTES)
        data = file.read(min(EXTENT_BYTES, record.num_bytes - extent * EXTENT_BYTES))
        if sum_of(data) != value:
            yield extent
