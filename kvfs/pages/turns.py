"""Where the last turns of a conversation begin in its file, so that an undo need not guess the place from the tokens.

A record is the length of the file before the turn, with a hash of the tokens up to this length. Records are part of
forks, copies and images. Any user may write an image, so a record counts only if its hash fits the file.
"""

from __future__ import annotations

import struct

import xxhash

from kvfs.pages.free_list import IntArray

MAX_TURNS = 64
TURN = struct.Struct("<QQ")
TURNS_BYTES = MAX_TURNS * TURN.size
"""Bytes of `MAX_TURNS` records in an image. Missing records are zeros."""


def with_turn(turns: bytes, tokens: IntArray) -> bytes:
    """Return the records with one more turn, which begins behind these tokens. At most the last 64 records are kept."""
    before = turns_within(turns, tokens.size)
    return (before + TURN.pack(tokens.size, _hash(tokens)))[-TURNS_BYTES:]


def turns_within(turns: bytes, length: int) -> bytes:
    """Return the records that remain after a file is cut. A turn without entries is dropped."""
    return b"".join(TURN.pack(at, check) for at, check in TURN.iter_unpack(turns) if at < length)


def fitting(turns: bytes, tokens: IntArray) -> list[int]:
    """Return where turns begin in a file with these tokens. Records whose hash does not fit are left out."""
    data, hashed, end, found = tokens.astype("<i4"), xxhash.xxh3_64(), 0, []
    for at, check in sorted(TURN.iter_unpack(turns)):  # sorted, so that one pass hashes all
        if at < tokens.size:
            hashed.update(data[end:at].tobytes())
            end = at
            if hashed.intdigest() == check:
                found.append(at)
    return found


def padded(turns: bytes) -> bytes:
    """Return records with the padding that an image has."""
    return turns.ljust(TURNS_BYTES, b"\0")


def without_padding(padded_turns: bytes) -> bytes:
    """Return the records of an image without their padding."""
    return b"".join(TURN.pack(at, check) for at, check in TURN.iter_unpack(padded_turns) if (at, check) != (0, 0))


def _hash(tokens: IntArray) -> int:
    return xxhash.xxh3_64_intdigest(tokens.astype("<i4").tobytes())
