"""Checks whether SQLite's log of the index has lost commits that were on disk.

SQLite reads the frames of a log, which are its records, up to the first frame with a wrong checksum, and ignores all
frames from there on. Ordinarily the ignored frames belong to the commit during which the power failed. But each commit
is on disk before the next commit begins. So if two or more commits follow the wrong checksum, the disk has changed
bytes that were written and synced.

Failed commits leave frames, too, if a shorter commit was written over them. But each frame's checksum continues the
checksum of the frame before. So two commits belong together if the checksums chain from the first commit to the second.

The format: https://www.sqlite.org/walformat.html
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct(">8I")
"""Magic, version, page size, sequence number, two salts, two checksums."""
_FRAME = struct.Struct(">6I")
"""Page number, size of the database in pages (in the last frame of a commit, else 0), two salts, two checksums."""
_MAGIC = 0x377F0682
"""The last bit is set if the checksums take words as big-endian."""
_SUMMED_HEADER_BYTES, _SUMMED_FRAME_BYTES = 24, 8
_PAGE_BYTES = 4096
_MASK = (1 << 32) - 1


def has_lost_commits(log: Path) -> bool:
    """Return whether the log of a closed index has lost commits. A missing log has lost no commits."""
    try:
        with log.open("rb") as file:
            return _has_commits_behind(file)
    except FileNotFoundError:
        return False


def _has_commits_behind(file: BinaryIO) -> bool:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, _version, _page_bytes, _sequence, *salts_and_sums = _HEADER.unpack(header)
    words = np.dtype(">u4" if magic & 1 else "<u4")
    sums: tuple[int, int] | None = _summed((0, 0), np.frombuffer(header[:_SUMMED_HEADER_BYTES], words))
    is_good = magic & ~1 == _MAGIC and sums == (*salts_and_sums[2:],)
    salts = salts_and_sums[:2] if is_good else None
    num_commits = 0
    while len(frame := file.read(_FRAME.size + _PAGE_BYTES)) == _FRAME.size + _PAGE_BYTES:
        _page, num_pages, *found = _FRAME.unpack_from(frame)
        salts = salts or found[:2]
        summed = frame[:_SUMMED_FRAME_BYTES] + frame[_FRAME.size :]
        if sums is None or found != [*salts, *_summed(sums, np.frombuffer(summed, words))]:
            is_good, num_commits = False, 0
        is_ours = found[:2] == salts  # else the frame is from an older log that this log overwrites, or in a lost block
        sums = (found[2], found[3]) if is_ours else None
        num_commits += is_ours and not is_good and num_pages > 0
        if num_commits > 1:
            return True
    return False


def _summed(sums: tuple[int, int], words: npt.NDArray[np.uint32]) -> tuple[int, int]:
    """Continue a checksum over some words, and return the result. SQLite adds pair after pair: s0 += x0 + s1, s1 += x1
    + s0. Here numpy computes the same sums with one product for all pairs.
    """
    factors = _factors(words.size // 2)
    values = np.concatenate((np.array(sums, np.uint32), words.astype(np.uint32)))
    first, second = (int((factors[each] * values).sum(dtype=np.uint32)) for each in (0, 1))
    return first & _MASK, second & _MASK


@cache
def _factors(num_pairs: int) -> npt.NDArray[np.uint32]:
    """Return the factors of the old sums and of each word in the two new sums. The factors are Fibonacci numbers."""
    found = np.empty((2, 2 * num_pairs + 2), np.uint32)
    of_first, of_second = [1, 0], [0, 1]  # factors in the final sums, last pair first
    for pair in range(num_pairs, 0, -1):
        both = [one + other & _MASK for one, other in zip(of_first, of_second, strict=True)]
        found[:, 2 * pair], found[:, 2 * pair + 1] = both, of_second
        of_first, of_second = both, [one + other & _MASK for one, other in zip(both, of_second, strict=True)]
    found[:, 0], found[:, 1] = of_first, of_second
    return found
