"""What a trace consists of: records of fixed sizes, in blocks of one kind. symphony-trace(5) says it for others.

Records are C structures in little-endian order without padding that has no name, so a loop in C may fill them. Neither
tokens nor texts are among them.
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
"""The version that has records of files: a reader of version 1 knows none."""
NO_DEADLINE = (1 << 63) - 1


class CallKind(IntEnum):
    """What a call is."""

    PREDICTION = 1
    GENERATION = 2
    WRITTEN_TEXT = 3
    """A part of a text that is written to the mount."""

    @property
    def word(self) -> str:
        """As people and scripts are told."""
        return {CallKind.PREDICTION: "pred", CallKind.GENERATION: "generate", CallKind.WRITTEN_TEXT: "text"}[self]


class BlockKind(IntEnum):
    """What the records of a block are, and its details, which records refer to."""

    ARRIVALS = 1
    """The details are numbers of accounts."""
    ANSWERS = 2
    STEPS = 3
    """The details are seats."""
    LOST = 4
    FILES = 5


ARRIVAL = np.dtype(
    [
        ("call", "<i8"),  # its number: of a decode loop that goes on in C, that of its first call
        ("ns", "<i8"),
        ("deadline_ns", "<i8"),  # NO_DEADLINE: it has none
        ("file", "<i8"),  # the number of the inode
        ("num_before", "<i4"),  # entries of the file
        ("num_tokens", "<i4"),  # that it appends; a generation's first ones
        ("pid", "<i4"),
        ("uid", "<u4"),  # of the program
        ("first_account", "<i4"),  # of those who pay, in the details of its block: a uid, then domains, the inmost last
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
        ("num_entries", "<i4"),  # that it appended
        ("errno", "<i4"),  # 0: none
    ]
)

STEP = np.dtype(
    [
        ("began_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("num_rows", "<i4"),
        ("num_prefill_rows", "<i4"),  # of them
        ("num_calls", "<i4"),
        ("reserved", "<i4"),
        ("num_entries", "<i8"),  # distinct ones that its decodes read
        ("num_pairs", "<i8"),  # of a row of a prefill and an entry that it sees
        ("predicted_ns", "<f8"),  # what the cost model said; not a number: nothing
        ("first_seat", "<i8"),  # in the details of its block, `num_calls` of them
    ]
)
SEAT = np.dtype(
    [
        ("call", "<i8"),
        ("num_now", "<i4"),  # rows
        ("length", "<i4"),  # entries before them
        ("arrived_ns", "<i8"),  # of a decode loop: when the token came that is computed
    ]
)

FILE = np.dtype(
    [
        ("file", "<i8"),  # the number of the inode
        ("source", "<i8"),  # it is a fork of this one; 0: it is none
        ("num_shared", "<i4"),  # entries that it had from there
        ("is_named", "<i4"),  # it has a name, so it outlives the program
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
        """What `data` is the bytes of: as many as these have."""
        size = num_records * RECORDS[kind].itemsize
        details = np.frombuffer(data, DETAILS.get(kind, ACCOUNT), num_details, size)
        return cls(kind, np.frombuffer(data, RECORDS[kind], num_records), details)

    @property
    def num_bytes(self) -> int:
        return self.records.nbytes + self.details.nbytes

    def tobytes(self) -> bytes:
        return self.records.tobytes() + self.details.tobytes()

    def within(self, max_bytes: int) -> Iterator[Block]:
        """The same in blocks of at most so many bytes each, but of one record at least."""
        if self.num_bytes <= max_bytes or len(self.records) == 1:
            yield self
            return
        half = len(self.records) // 2
        for records in (self.records[:half], self.records[half:]):
            yield from self._part(records).within(max_bytes)

    def _part(self, records: Records) -> Block:
        """Some consecutive records, with their own details."""
        if self.kind not in REFERENCES:
            return Block(self.kind, records, self.details)
        first_name, count_name = REFERENCES[self.kind]
        first, end = int(records[first_name][0]), int(records[first_name][-1] + records[count_name][-1])
        records = records.copy()
        records[first_name] -= first
        return Block(self.kind, records, self.details[first:end])


REFERENCES = {BlockKind.ARRIVALS: ("first_account", "num_accounts"), BlockKind.STEPS: ("first_seat", "num_calls")}
"""The fields of records that say where their details are: these lie in the order of the records."""


def block_bytes(kind: BlockKind, num_records: int, num_details: int) -> int:
    """Of a block with so many."""
    return num_records * RECORDS[kind].itemsize + num_details * DETAILS.get(kind, NOTHING).itemsize


def references_hold(block: Block) -> bool:
    """Whether its records refer to details that are there, in order."""
    if block.kind not in REFERENCES:
        return not len(block.details)
    first_name, count_name = REFERENCES[block.kind]
    counts = block.records[count_name].astype(np.int64)
    firsts: Any = np.cumsum(counts) - counts
    in_order = (counts >= 0).all() and (block.records[first_name] == firsts).all()
    return bool(in_order and counts.sum() == len(block.details))
