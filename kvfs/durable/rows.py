"""Rows of the index as SQLite gives them, verified one by one. `Broken` names a row that is not as it was written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Row
from kvfs.durable.records import (
    ENTRY_BYTES,
    Broken,
    InodeRecord,
    SlotRecord,
    SumsRecord,
    VersionRecord,
    decode_inode,
    decode_sums,
    decode_version,
    decode_xattrs,
    name_check,
    slot_check,
    text_check,
)
from libsym.abi import PAGE_ENTRIES

T = TypeVar("T")

MAX_SLOT = 1 << 31


def about_row(row: Row) -> tuple[str, str]:
    key, value, check = row
    if text_check(str(key), str(value)) != check:
        raise Broken(f"its row {key} has a wrong checksum")
    return str(key), str(value)


def identity_row(row: Row) -> tuple[int, KeptFacts]:
    number, text, check = row
    if text_check(str(number), str(text)) != check:
        raise Broken(f"identity {number} has a wrong checksum")
    return _int(number), KeptFacts.parse(str(text))


def inode_row(row: Row) -> tuple[int, InodeRecord]:
    return _decoded("inode", decode_inode, row)


def xattrs_row(row: Row) -> tuple[int, dict[bytes, bytes]]:
    return _decoded("the attributes of inode", decode_xattrs, row)


def sums_row(row: Row) -> tuple[int, SumsRecord]:
    number, part, data = row
    try:
        return _int(number), decode_sums(_int(number), _int(part), _bytes(data))
    except (Broken, ValueError, struct.error) as error:
        raise Broken(f"checksums {part} of inode {number}: {error}") from None


def version_row(row: Row) -> tuple[int, VersionRecord]:
    return _decoded("the list of entries of inode", decode_version, row)


def name_row(row: Row) -> tuple[int, bytes, int]:
    directory, name, number, check = row
    place = _int(directory), _bytes(name), _int(number)
    if name_check(*place) != check:
        raise Broken(f"the name {name!r} in inode {directory} has a wrong checksum")
    return place


def slot_row(row: Row) -> tuple[int, SlotRecord]:
    identity, slot, check, num_kept, entries, row_check = row
    record = SlotRecord(_int(slot), _int(check) & (1 << 64) - 1, _int(num_kept), _bytes(entries))
    number = _int(identity)
    is_possible = 0 <= record.slot < MAX_SLOT and 1 <= record.kept <= PAGE_ENTRIES and number >= 0
    if not is_possible or len(record.entries) != ENTRY_BYTES or slot_check(number, record) != row_check:
        raise Broken(f"slot {slot} of identity {identity} has a wrong checksum")
    return number, record


def _decoded(what: str, decode: Callable[[int, bytes], T], row: Row) -> tuple[int, T]:
    number, data = row
    try:
        return _int(number), decode(_int(number), _bytes(data))
    except Broken as error:
        raise Broken(f"{what} {number}: {error}") from None


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise Broken(f"{value!r} stands where a number should")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise Broken(f"{value!r} stands where bytes should")
    return value
