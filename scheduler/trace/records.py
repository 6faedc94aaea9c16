"""Records of a trace. Records have fixed sizes, and each block has records of one kind. symphony-trace(5) documents
them.

A record is a little-endian C structure in which all padding has a name, so a loop in C can fill it. Records contain
neither tokens nor texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Records: TypeAlias = "npt.NDArray[np.void]"

VERSION = 2
FILES_SINCE = 2
"""First version with records of files, which a reader of version 1 does not know."""
NO_DEADLINE = (1 << 63) - 1


class CallKind(IntEnum):
    """Kind of call in a record."""

    PREDICTION = 1
    GENERATION = 2
    WRITTEN_TEXT = 3
    """Part of a text that a program writes to the mount."""

    @property
    def word(self) -> str:
        """Return the name of the kind that commands print."""
        return {CallKind.PREDICTION: "pred", CallKind.GENERATION: "generate", CallKind.WRITTEN_TEXT: "text"}[self]


class BlockKind(IntEnum):
    """Kind of a block's records. Records refer to details, which follow all records in the block."""

    ARRIVALS = 1
    """The details are accounts, each as the number that identifies it."""
    ANSWERS = 2
    STEPS = 3
    """The details are seats."""
    LOST = 4
    FILES = 5


ARRIVAL = np.dtype(
    [
        ("call", "<i8"),  # serial number; a decode loop in C keeps the serial number of its first call
        ("ns", "<i8"),
        ("deadline_ns", "<i8"),  # NO_DEADLINE: none
        ("file", "<i8"),  # its inode number
        ("num_before", "<i4"),  # entries of the file before the call
        ("num_tokens", "<i4"),  # tokens that the call appends; for a generation, the tokens that it begins with
        ("pid", "<i4"),
        ("uid", "<u4"),  # of the program
        ("first_account", "<i4"),  # index of the first payer in the details: a uid, then domains, the innermost last
        ("num_accounts", "<i2"),
        ("kind", "<i1"),
        ("priority", "<i1"),
    ]
)
ACCOUNT = np.dtype([("number", "<i8")])

ANSWER = np.dtype(
    [
        ("call", "<i8"),
        ("ns", "<i8"),
        ("num_entries", "<i4"),  # appended entries
        ("errno", "<i4"),  # 0: success
    ]
)

STEP = np.dtype(
    [
        ("began_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("num_rows", "<i4"),
        ("num_prefill_rows", "<i4"),  # rows of prefills among num_rows
        ("num_calls", "<i4"),
        ("reserved", "<i4"),
        ("num_entries", "<i8"),  # distinct entries that the step's decodes read
        ("num_pairs", "<i8"),  # pairs of a prefill's row and an entry that the row attends to
        ("predicted_ns", "<f8"),  # prediction of the cost model; NaN: none
        ("first_seat", "<i8"),  # index into the block's details, which have `num_calls` seats for this step
    ]
)
SEAT = np.dtype(
    [
        ("call", "<i8"),
        ("num_now", "<i4"),  # rows of this call in the step
        ("length", "<i4"),  # entries of the file before these rows
        ("arrived_ns", "<i8"),  # in a decode loop: when the token of this row arrived
    ]
)

FILE = np.dtype(
    [
        ("file", "<i8"),  # its inode number
        ("source", "<i8"),  # inode number of the file it was forked from; 0: none
        ("num_shared", "<i4"),  # entries shared with the source
        ("is_named", "<i4"),  # 1: the file has a name, so it outlives the program
    ]
)

LOST = np.dtype([("ns", "<i8"), ("num_records", "<i8")])

RECORDS = {
    BlockKind.ARRIVALS: ARRIVAL,
    BlockKind.ANSWERS: ANSWER,
    BlockKind.STEPS: STEP,
    BlockKind.LOST: LOST,
    BlockKind.FILES: FILE,
}
NOTHING = np.dtype([])
DETAILS = {BlockKind.ARRIVALS: ACCOUNT, BlockKind.STEPS: SEAT}
_NO_DETAILS = np.zeros(0, ACCOUNT)


@dataclass(frozen=True, slots=True)
class Block:
    """Records of one kind, and their details."""

    kind: BlockKind
    records: Records
    details: Records

    @classmethod
    def of(cls, kind: BlockKind, records: Records, details: Records | None = None) -> Block:
        return cls(kind, records, _NO_DETAILS if details is None else details)

    @classmethod
    def parse(cls, kind: BlockKind, num_records: int, num_details: int, data: bytes) -> Block:
        """Return the block in `data`, which has `num_records` records and `num_details` details."""
        size = num_records * RECORDS[kind].itemsize
        details = np.frombuffer(data, DETAILS.get(kind, ACCOUNT), num_details, size)
        return cls(kind, np.frombuffer(data, RECORDS[kind], num_records), details)

    @property
    def num_bytes(self) -> int:
        return self.records.nbytes + self.details.nbytes

    def tobytes(self) -> bytes:
        return self.records.tobytes() + self.details.tobytes()

    def within(self, max_bytes: int) -> Iterator[Block]:
        """Yield the block in parts of at most `max_bytes` each. A part with a single record may be larger."""
        if self.num_bytes <= max_bytes or len(self.records) == 1:
            yield self
            return
        half = len(self.records) // 2
        for records in (self.records[:half], self.records[half:]):
            yield from self._part(records).within(max_bytes)

    def _part(self, records: Records) -> Block:
        """Return a block of some consecutive records and their details."""
        if self.kind not in REFERENCES:
            return Block(self.kind, records, self.details)
        first_name, count_name = REFERENCES[self.kind]
        first, end = int(records[first_name][0]), int(records[first_name][-1] + records[count_name][-1])
        records = records.copy()
        records[first_name] -= first
        return Block(self.kind, records, self.details[first:end])


REFERENCES = {BlockKind.ARRIVALS: ("first_account", "num_accounts"), BlockKind.STEPS: ("first_seat", "num_calls")}
"""Fields of a record that locate its details: index of the first detail, and count. Details are in the order of the
records.
"""


def block_bytes(kind: BlockKind, num_records: int, num_details: int) -> int:
    """Return the number of bytes of a block with this many records and details."""
    return num_records * RECORDS[kind].itemsize + num_details * DETAILS.get(kind, NOTHING).itemsize


def references_hold(block: Block) -> bool:
    """Return whether a block's records refer to all its details, in order."""
    if block.kind not in REFERENCES:
        return not len(block.details)
    first_name, count_name = REFERENCES[block.kind]
    counts = block.records[count_name].astype(np.int64)
    firsts: Any = np.cumsum(counts) - counts
    in_order = (counts >= 0).all() and (block.records[first_name] == firsts).all()
    return bool(in_order and counts.sum() == len(block.details))
