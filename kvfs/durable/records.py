"""Rows of the index as bytes, each with a checksum over its content and its key.

Records are named tuples: a start reads a hundred thousand records, and a dataclass takes four times as long to make.

Decoding raises `Broken` for a damaged row, and for a row under another row's key.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import xxhash

from kvfs.names.inode import XattrSums
from kvfs.names.retention import NO_ADVICE, FileAdvice
from kvfs.names.sums import EXTENT_BYTES, PART_EXTENTS, num_extents
from kvfs.pages.free_list import IntArray
from kvfs.pages.turns import TURN
from libsym.abi import PAGE_ENTRIES

CHECK_BYTES = 8
ENTRY_BYTES = 8 * PAGE_ENTRIES
"""Size of a page's tokens and positions, each a little-endian integer of 4 bytes."""

_NO_LIMIT = -1
INODE = struct.Struct("<IIIIqqqIqq")
"""The first fields of an inode's record, which differ from file to file. The fields after them are equal for most
files.
"""
_REST = struct.Struct("<BqiqqHH")
VERSION = struct.Struct("<IqqI")
NUM_TURNS_SHIFT = 24
"""The last number of `VERSION` has two parts. The bits from this bit up are the number of turns. The bits below are the
size of the marks in bytes.
"""
SLOT = struct.Struct("<IIqb")
NAME = struct.Struct("<qq")
_COUNT = struct.Struct("<H")
_APART = struct.Struct("<III")
_OF_XATTRS = 1 << 63
"""Bit in the seed of the checksum of attributes. Because of this bit, a row of attributes in a damaged index can't be
mistaken for an inode's row.
"""
_SUMS = struct.Struct("<qqq")
_OF_SUMS = 1 << 62
"""Bit in the seed of the checksum of rows of sums, for the same reason."""
_LENGTH = struct.Struct("<I")
_JSON = json.JSONEncoder(separators=(",", ":"))  # made once: making an encoder takes as long as encoding a mark

Mark = tuple[str, int]
"""A name for everything that the bits of entries depend on, and the entry at which the validity of that name ends: see
`KvFile.marks`.
"""


SEE_FSCK = "`symphony fsck` says what is lost, and with --repair keeps the rest"
"""The end of messages about damage."""


class Broken(Exception):  # noqa: N818 - as the errors of libsym
    """Error for a row that is not as it was written."""


class InodeRecord(NamedTuple):
    """An inode without its names and its entries."""

    file_type: int
    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    device: int = 0
    used_ns: int = 0
    """When a file with a TTL was last closed."""
    backing: int = _NO_LIMIT
    """Number of a plain file's backing file; below 0: there is none."""
    advice: FileAdvice = NO_ADVICE
    is_domain: bool = False
    limit_bytes: int | None = None
    limit_files: int | None = None
    target: bytes = b""
    xattrs: Mapping[bytes, bytes] = MappingProxyType({})
    has_entries: bool = False
    """Whether the KV file has a version. Because of this field, a file whose version's row is lost is not taken for an
    empty file.
    """
    apart: XattrSums | None = None
    """Count and bytes of the attributes, if the attributes are not in this record but in a row of their own."""


class VersionRecord(NamedTuple):
    """The entries of a KV file that are on disk."""

    identity: int
    """Number of the identity of the pages."""
    length: int
    full_length: int
    """Number of entries that the file had, on disk or not."""
    marks: tuple[Mark, ...]
    slots: IntArray
    turns: bytes = b""
    """The places where turns of the conversation begin: see `kvfs.pages.turns`."""


class SlotRecord(NamedTuple):
    """The content of a slot."""

    slot: int
    check: int
    kept: int
    """How many entries of the page the slot holds."""
    entries: bytes
    """Tokens of the entries, then their positions."""


class SumsRecord(NamedTuple):
    """Checksums of one part of a plain file, in extents of EXTENT_BYTES."""

    part: int
    """Serial number of the part in the file. A part has PART_EXTENTS extents."""
    backing: int
    """The number of the backing file that has the bytes."""
    num_bytes: int
    """How many bytes of the part were synced."""
    sums: array[int]
    """Sums by extent; 0: the extent is unchecked."""


def encode_inode(number: int, record: InodeRecord) -> bytes:
    advice, limits = record.advice, (record.limit_bytes, record.limit_files)
    texts = _texts(record.xattrs) if record.apart is None else _APART.pack(*record.apart)
    rest = _REST.pack(
        advice.pinned | record.is_domain << 1 | record.has_entries << 2 | (record.apart is not None) << 3,
        advice.ttl_ms,
        advice.priority,
        *(_NO_LIMIT if limit is None else limit for limit in limits),
        len(record.target),
        len(record.xattrs),
    )
    first = record[: InodeRecord._fields.index("advice")]
    return _sealed(number, INODE.pack(*first) + rest + record.target + texts)


def decode_inode(number: int, data: bytes) -> InodeRecord:
    body = _opened(number, data)
    return InodeRecord._make(INODE.unpack_from(body) + rest_of_inode(body[INODE.size :]))


def rest_of_inode(
    data: bytes,
) -> tuple[FileAdvice, bool, int | None, int | None, bytes, Mapping[bytes, bytes], bool, XattrSums | None]:
    """Return the fields of a record from `advice` on."""
    flags, ttl_ms, priority, limit_bytes, limit_files, num_target, num_xattrs = _REST.unpack_from(data)
    at = _REST.size + num_target
    return (
        FileAdvice(bool(flags & 1), ttl_ms, priority) if flags & 1 or ttl_ms or priority else NO_ADVICE,
        bool(flags & 2),
        None if limit_bytes == _NO_LIMIT else limit_bytes,
        None if limit_files == _NO_LIMIT else limit_files,
        data[_REST.size : at],
        _xattrs(data, at, num_xattrs) if num_xattrs else {},
        bool(flags & 4),
        XattrSums._make(_APART.unpack_from(data, at)) if flags & 8 else None,
    )


def encode_xattrs(number: int, xattrs: Mapping[bytes, bytes]) -> bytes:
    """Return the record of attributes that are not in the inode's own record."""
    return _sealed(number | _OF_XATTRS, _COUNT.pack(len(xattrs)) + _texts(xattrs))


def decode_xattrs(number: int, data: object) -> dict[bytes, bytes]:
    body = _opened(number | _OF_XATTRS, data)
    return _xattrs(body, _COUNT.size, *_COUNT.unpack_from(body))


def encode_sums(number: int, record: SumsRecord) -> bytes:
    head = _SUMS.pack(record.part, record.backing, record.num_bytes)
    return _sealed(number | _OF_SUMS, head + _little_endian(record.sums).tobytes())


def decode_sums(number: int, part: int, data: object) -> SumsRecord:
    body = _opened(number | _OF_SUMS, data)
    of_part, backing, num_bytes = _SUMS.unpack_from(body)
    sums = _little_endian(array("Q", body[_SUMS.size :]))
    if of_part != part or not 0 < num_bytes <= PART_EXTENTS * EXTENT_BYTES or len(sums) != num_extents(num_bytes):
        raise Broken(f"{len(sums)} sums are said to be of {num_bytes} bytes of part {of_part}")
    return SumsRecord(part, backing, num_bytes, sums)


def _little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return sums
    swapped = array("Q", sums)
    swapped.byteswap()
    return swapped


def _texts(xattrs: Mapping[bytes, bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(text)) + text for pair in sorted(xattrs.items()) for text in pair)


def _xattrs(body: bytes, at: int, count: int) -> dict[bytes, bytes]:
    texts = []
    for _ in range(2 * count):
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        texts.append(body[at : at + size])
        at += size
    return dict(zip(texts[::2], texts[1::2], strict=True))


def encode_version(number: int, record: VersionRecord) -> bytes:
    marks = _JSON.encode(record.marks).encode() if record.marks else b""
    assert len(marks) >> NUM_TURNS_SHIFT == 0
    sizes = len(marks) | len(record.turns) // TURN.size << NUM_TURNS_SHIFT
    header = VERSION.pack(record.identity, record.length, record.full_length, sizes)
    return _sealed(number, header + marks + record.turns + record.slots.astype("<i4").tobytes())


def decode_version(number: int, data: bytes) -> VersionRecord:
    body = _opened(number, data)
    identity, length, full_length, sizes = VERSION.unpack_from(body)
    marks_stop = VERSION.size + (sizes & (1 << NUM_TURNS_SHIFT) - 1)
    at = marks_stop + TURN.size * (sizes >> NUM_TURNS_SHIFT)
    marks, turns = parse_marks(body[VERSION.size : marks_stop]), body[marks_stop:at]
    slots = np.frombuffer(body, "<i4", offset=at)
    if slots.size != -(-length // PAGE_ENTRIES) or not 0 <= length <= full_length:
        raise Broken(f"{length} entries, of {full_length}, are said to be in {slots.size} slots")
    return VersionRecord(identity, length, full_length, marks, slots, turns)


@lru_cache(maxsize=1024)
def parse_marks(text: bytes) -> tuple[Mark, ...]:
    return tuple((bits, stop) for bits, stop in json.loads(text)) if text else ()


def slot_check(identity: int, record: SlotRecord) -> int:
    return _hash(SLOT.pack(identity, record.slot, signed(record.check), record.kept) + record.entries, 0)


def name_check(directory: int, name: bytes, number: int) -> int:
    return _hash(NAME.pack(directory, number) + name, 0)


def text_check(key: str, value: str) -> int:
    """Return the checksum of a row of texts."""
    return _hash(f"{key}\0{value}".encode(), 0)


def signed(check: int) -> int:
    """Return a checksum as a signed integer, as SQLite stores it."""
    return check - (1 << 64) if check >> 63 else check


def _hash(data: bytes, seed: int) -> int:
    return signed(xxhash.xxh3_64_intdigest(data, seed))


def _sealed(number: int, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body, number) + body


def _opened(number: int, data: object) -> bytes:
    if not isinstance(data, bytes):
        raise Broken(f"{data!r} stands where bytes should")
    body = data[CHECK_BYTES:]
    if xxhash.xxh3_64_digest(body, number) != data[:CHECK_BYTES]:
        raise Broken("its checksum is wrong")
    return body
