"""Carries out a plan of fsck: makes a new index beside the old one. The new index then replaces the old index in one
step.

Slots and backing files stay where they are; only superblocks of slot files are rewritten. If the repair is interrupted
at any point, the state is either as it was, or repaired.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Index, Row, Rows
from kvfs.durable.mend import Plan
from kvfs.durable.records import (
    encode_inode,
    encode_sums,
    encode_version,
    encode_xattrs,
    name_check,
    signed,
    slot_check,
    text_check,
)
from kvfs.durable.salvage import Salvage
from kvfs.durable.slot_survey import SlotSurvey
from kvfs.durable.sound_rows import SoundRows, slot_records, xattrs_rows
from kvfs.durable.state import INDEX_NAME, REPAIRED_NAME, finish_repair
from kvfs.durable.superblock import make_slot_file, superblock, sync_directory, write_superblock
from libsym.errors import SymError

LOST = "lost"
"""Directory in `files` and in `slots` for files without an owner. The daemon does not look into it."""
T = TypeVar("T")

_ROWS_A_COMMIT = 4096


def carry_out(directory: Path, plan: Plan, salvage: Salvage, surveys: dict[int, SlotSurvey]) -> None:
    """Write the new index, and replace the old index by it. If this fails, raise SymError, and the old index stays."""
    try:
        _write_index(directory / "index.db.new", plan, salvage)
        for identity, facts in plan.facts.items():
            _mend_beginning(directory, plan.uuid, identity, facts, surveys[identity])
        (directory / "index.db.new").rename(directory / REPAIRED_NAME)
        sync_directory(directory)
        finish_repair(directory)
    except OSError as error:
        if isinstance(error, SymError):
            raise
        message = f"can't write the new index of {directory}: {error.strerror}; {INDEX_NAME} is as it was"
        raise SymError(message, error.errno) from error


def put_aside(directory: Path, name: str) -> None:
    """Move a file that no row of the index names to LOST, because a user may miss the file."""
    lost = directory / LOST
    lost.mkdir(mode=0o700, exist_ok=True)
    target = lost / name
    while target.exists():
        target = target.with_name(target.name + "'")
    (directory / name).rename(target)
    sync_directory(lost)
    sync_directory(directory)


def _mend_beginning(directory: Path, uuid: str, identity: int, facts: KeptFacts, survey: SlotSurvey) -> None:
    path, block = directory / "slots" / f"{identity}.kv", superblock(uuid, identity, facts)
    if survey.is_missing:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        make_slot_file(path, block)
    elif survey.is_misnamed:
        write_superblock(path, block)


def _write_index(path: Path, plan: Plan, salvage: Salvage) -> None:
    for old in (path, Path(f"{path}-wal")):
        old.unlink(missing_ok=True)
    index = Index(path, new_uuid=plan.uuid)
    texts = {identity: facts.text() for identity, facts in plan.facts.items()}
    identities = [(identity, text, text_check(str(identity), text)) for identity, text in texts.items()]
    index.commit(Rows(identities=identities, next_inode=plan.next_inode))
    inodes = ((number, encode_inode(number, each)) for number, each in plan.inodes.items())
    versions = ((number, encode_version(number, each)) for number, each in plan.versions.items())
    places = ((directory, name, number) for (directory, name), number in plan.names.items())
    names = ((*place, name_check(*place)) for place in places)
    sums = ((number, part, encode_sums(number, each)) for (number, part), each in plan.sums.items())
    batches = zip_longest(
        _batches(inodes),
        _batches(versions),
        _batches(names),
        _batches(_slot_rows(plan, salvage)),
        _batches(sums),
        fillvalue=(),
    )
    for inode_rows, version_rows, name_rows, slot_rows, sums_rows in batches:
        index.commit(
            Rows(
                inodes=[*inode_rows],
                versions=[*version_rows],
                names=[*name_rows],
                slots=[*slot_rows],
                sums=[*sums_rows],
            )
        )
    for number, row in _xattrs_rows(plan, salvage):  # one at a time, because a batch would take 512 MiB
        index.commit(Rows(xattrs=[(number, row)]))
    index.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _slot_rows(plan: Plan, salvage: Salvage) -> Iterable[Row]:
    """Yield the rows of slots that files need. For each slot, the first sound row is read again from the old index."""
    needed: set[tuple[int, int]] = set()
    for version in plan.versions.values():
        needed.update((version.identity, slot) for slot in version.slots.tolist())
    for identity, record in slot_records(salvage, SoundRows()):
        if (identity, record.slot) in needed:
            needed.discard((identity, record.slot))
            check = slot_check(identity, record)
            yield identity, record.slot, signed(record.check), record.kept, record.entries, check


def _xattrs_rows(plan: Plan, salvage: Salvage) -> Iterable[tuple[int, bytes]]:
    needed = {number for number, inode in plan.inodes.items() if inode.apart is not None}
    for number, xattrs in xattrs_rows(salvage, SoundRows()):
        if number in needed:
            needed.discard(number)
            yield number, encode_xattrs(number, xattrs)


def _batches(rows: Iterable[T]) -> Iterable[list[T]]:
    batch: list[T] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _ROWS_A_COMMIT:
            yield batch
            batch = []
    yield batch
