"""Digests of pages: BLAKE2b-256, of eight pages at a time if the processor can."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from kvfs._pages import ffi, lib

DIGEST_BYTES = 32

NUM_LANES = 8
"""Pages that are hashed together."""

_BLOCK_BYTES = 128
_FEWEST = 3
"""With fewer pages than this, hashing one page after the other is faster."""

Bytes: TypeAlias = bytes | memoryview

_is_fast = bool(lib.digest_is_fast())


def digest(data: Bytes) -> bytes:
    """Return the digest of a page, or of any other bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def digests(pages: Sequence[Bytes]) -> list[bytes]:
    """Return the digests of pages of one size. The GIL is released, so other threads run in the meantime."""
    found: list[bytes] = []
    for first in range(0, len(pages), NUM_LANES):
        found += _of_group(pages[first : first + NUM_LANES])
    return found


def _of_group(pages: Sequence[Bytes]) -> list[bytes]:
    size = len(pages[0])
    assert all(len(page) == size for page in pages)
    if not _is_fast or len(pages) < _FEWEST or size == 0 or size % _BLOCK_BYTES:
        return [digest(page) for page in pages]
    held = [ffi.from_buffer("uint8_t[]", page) for page in pages]
    lanes = ffi.new("uint8_t *[]", [*held, *held[:1] * (NUM_LANES - len(held))])
    out = bytearray(NUM_LANES * DIGEST_BYTES)
    lib.digest_pages(lanes, size, ffi.from_buffer("uint8_t[]", out))
    return [bytes(out[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]) for i in range(len(pages))]
