"""A trace as a file: a magic line, a line of JSON, and blocks. symphony-trace(5) describes every byte.

Within a block, the first bytes of all records come first, then the second bytes, and so on. Then the block is deflated.
A step with 64 decodes takes 0.3 KB, a fifth of the size of its records, because most bytes are equal to those of the
previous record.

A file may end anywhere, because its writer may be killed or the disk may be full. A reader takes all whole blocks.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from libsym.errors import Invalid
from scheduler.trace.records import (
    ACCOUNT,
    DETAILS,
    RECORDS,
    REFERENCES,
    VERSION,
    Block,
    BlockKind,
    Records,
    block_bytes,
    references_hold,
)

MAGIC = b"symphony trace "
MAX_BLOCK_BYTES = 16 << 20
"""Maximum number of bytes of a block's records. A reader needs no more memory than this, whatever the file says."""
MAX_HEADER_BYTES = 1 << 20
_HEAD = struct.Struct("<5I")  # CRC-32 of the rest of the block; kind; counts of records, details and stored bytes
_CHECKED_FROM = 4
_DEFLATE_LEVEL = 1  # its result is at most a fifth larger than that of level 6


class TraceWriter:
    """Writer of a trace. A block is in the file when `add` returns."""

    def __init__(self, file: BinaryIO, header: Mapping[str, Any]) -> None:
        self._file = file
        self.num_bytes = 0
        self._write(b"%s%d\n" % (MAGIC, VERSION) + json.dumps(header).encode("ascii") + b"\n")

    def add(self, block: Block) -> None:
        for part in block.within(MAX_BLOCK_BYTES):
            stored = zlib.compress(_planes(part.records) + _planes(part.details), _DEFLATE_LEVEL)
            numbers = part.kind, len(part.records), len(part.details), len(stored)
            checksum = zlib.crc32(_HEAD.pack(0, *numbers)[_CHECKED_FROM:] + stored)
            self._write(_HEAD.pack(checksum, *numbers) + stored)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self.num_bytes += len(data)


@dataclass(frozen=True, slots=True)
class Trace:
    """All records of a file. `first_account` and `first_seat` are indexes into all of `accounts` and `seats`."""

    header: Mapping[str, Any]
    arrivals: Records
    accounts: Records
    answers: Records
    steps: Records
    seats: Records
    lost: Records
    files: Records
    """Records of KV files. If a KV file has several records, the last one counts. A trace of version 1 has no such
    records.
    """
    torn_at: int | None
    """Offset in bytes of the first damaged or torn block. None: the file is whole."""

    @property
    def num_lost(self) -> int:
        return int(self.lost["num_records"].sum())


class TraceReader:
    """Reader that reads a file once, block by block. Invalid: the file is no trace, or has a newer version."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.header = _header(file, name)
        self.torn_at: int | None = None
        """Offset of the first damaged or torn block. `blocks` sets the offset when it stops."""

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in the order of the file, and stop before the first damaged or torn block."""
        place = self._file.tell()
        while head := self._file.read(_HEAD.size):
            block = _block(head, self._file)
            if block is None:
                self.torn_at = place
                return
            yield block
            place = self._file.tell()


def read_trace(path: Path) -> Trace:
    """Read a whole file. Invalid: the file is no trace, or has a newer version. OSError: the file can't be read."""
    with path.open("rb") as file:
        reader = TraceReader(file, str(path))
        blocks = list(reader.blocks())
    arrivals, accounts = _joined(BlockKind.ARRIVALS, blocks)
    answers, _ = _joined(BlockKind.ANSWERS, blocks)
    steps, seats = _joined(BlockKind.STEPS, blocks)
    lost, _ = _joined(BlockKind.LOST, blocks)
    files, _ = _joined(BlockKind.FILES, blocks)
    return Trace(reader.header, arrivals, accounts, answers, steps, seats, lost, files, reader.torn_at)


def _joined(kind: BlockKind, blocks: Iterable[Block]) -> tuple[Records, Records]:
    found = [block for block in blocks if block.kind is kind]
    records = np.concatenate([block.records for block in found] or [np.zeros(0, RECORDS[kind])])
    details = np.concatenate([block.details for block in found] or [np.zeros(0, DETAILS.get(kind, ACCOUNT))])
    if kind in REFERENCES:
        first_name, count_name = REFERENCES[kind]
        counts = records[count_name].astype(np.int64)
        records[first_name] = np.cumsum(counts) - counts
    return records, details


def _header(file: BinaryIO, name: str) -> Mapping[str, Any]:
    magic = file.readline(len(MAGIC) + 16)
    version = magic.removeprefix(MAGIC).strip()
    if not magic.startswith(MAGIC) or not magic.endswith(b"\n") or not version.isdigit():
        raise Invalid(f"{name} is no trace: it does not begin with `{MAGIC.decode()}` and a number")
    if int(version) > VERSION:
        raise Invalid(
            f"{name} is a trace of version {int(version)}, {VERSION} is the newest known here: update Symphony"
        )
    line = file.readline(MAX_HEADER_BYTES)
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise Invalid(f"{name} is a trace without a header: its second line is no object of JSON")
    return header


def _block(head: bytes, file: BinaryIO) -> Block | None:
    """Read the block that begins with `head`. None: the block is torn or damaged."""
    if len(head) < _HEAD.size:
        return None
    checksum, number, num_records, num_details, num_stored = _HEAD.unpack(head)
    if number not in RECORDS:
        return None
    kind = BlockKind(number)
    size = block_bytes(kind, num_records, num_details)
    if num_stored > MAX_BLOCK_BYTES or size > MAX_BLOCK_BYTES or (num_details and kind not in DETAILS):
        return None
    stored = file.read(num_stored)
    if zlib.crc32(head[_CHECKED_FROM:] + stored) != checksum:
        return None
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(stored, size + 1)
    except zlib.error:
        return None
    if len(data) != size or not inflating.eof or inflating.unused_data:
        return None
    split = num_records * RECORDS[kind].itemsize
    rows = _rows(data[:split], num_records) + _rows(data[split:], num_details)
    block = Block.parse(kind, num_records, num_details, rows)
    return block if references_hold(block) else None


def _planes(records: Records) -> bytes:
    """Return the first byte of each record, then the second byte of each record, and so on."""
    return np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1 if len(records) else 0).T.tobytes()


def _rows(planes: bytes, count: int) -> bytes:
    """Undo `_planes`: return the bytes of the `count` records."""
    return np.frombuffer(planes, np.uint8).reshape(-1 if count else 0, count).T.tobytes()
