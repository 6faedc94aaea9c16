"""Where the last turns of a conversation begin in its file: what undoes a turn need not guess it from the tokens.

A record is the length of the file before the turn, with a hash of the tokens up to there. Records go along with forks,
copies and images, and anybody may have written an image: so a record counts only where its hash fits the file.
"""

from __future__ import annotations

import struct

import xxhash

from kvfs.pages.free_list import IntArray

MAX_TURNS = 64
TURN = struct.Struct("<QQ")
TURNS_BYTES = MAX_TURNS * TURN.size
"""Of all records that there may be, as an image has them: those that are missing are zeros."""


def with_turn(turns: bytes, tokens: IntArray) -> bytes:
    """Return the records when one more turn begins behind these tokens: the last 64."""
    before = turns_within(turns, tokens.size)
    return (before + TURN.pack(tokens.size, _hash(tokens)))[-TURNS_BYTES:]


def turns_within(turns: bytes, length: int) -> bytes:
    """Return the records that are left of a file that is cut: a turn without an entry is none."""
    return b"".join(TURN.pack(at, check) for at, check in TURN.iter_unpack(turns) if at < length)


def fitting(turns: bytes, tokens: IntArray) -> list[int]:
    """Return where turns begin in a file with these tokens, as far as is known."""
    data, hashed, end, found = tokens.astype("<i4"), xxhash.xxh3_64(), 0, []
    for at, check in sorted(TURN.iter_unpack(turns)):  # in order one pass hashes all
        if at < tokens.size:
            hashed.update(data[end:at].tobytes())
            end = at
            if hashed.intdigest() == check:
                found.append(at)
    return found


def padded(turns: bytes) -> bytes:
    """Return records as an image has them."""
    return turns.ljust(TURNS_BYTES, b"\0")


def without_padding(padded_turns: bytes) -> bytes:
    """Return the records of an image."""
    return b"".join(TURN.pack(at, check) for at, check in TURN.iter_unpack(padded_turns) if (at, check) != (0, 0))


def _hash(tokens: IntArray) -> int:
    return xxhash.xxh3_64_intdigest(tokens.astype("<i4").tobytes())
