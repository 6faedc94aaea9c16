"""Memory of packed weights: one range of addresses, whose bytes are anonymous memory or a mapping of a file.

A file with the same bytes can take the place of the anonymous memory while steps read it. Linux replaces a mapping at
once (MAP_FIXED): a thread that reads sees the old page or the new page. So a daemon that has just packed its weights
computes immediately, and shares its memory with other daemons as soon as the file is on disk.

A product reads weights at the speed of the memory only from huge pages. On an AMD EPYC, a 1.1 B model of 4-bit weights
decoded 59 tokens/s from anonymous huge pages and from a file in huge pages, and 39 tokens/s from a file in small pages.
So a file is mapped only if its pages are huge in the page cache, and is copied into anonymous memory if they are not.
File systems have huge pages if Linux lets them (ext4 since 6.16, XFS since 5.18) and the file was written or read in
pieces that are large enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from decoder.checkpoints.quants import ByteArray
from decoder.memory import advise_huge_pages
from libsym.errors import SymError

HUGE_BYTES = 2 << 20
HUGE_SHARE = 3 / 4
"""Share of a file that must be in huge pages. With a half, an 8 B model decoded at 0.97 of the rate from anonymous huge
pages; with 99 %, a 1.1 B model at 0.99, which is no difference."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ, MADV_POPULATE_WRITE. Python 3.11 has no names for them."""
_AT_ONCE_BYTES = 64 << 20
_FIXED = 0x10
"""MAP_FIXED."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]


class PanelMemory:
    """A range of memory that begins at a huge page. At first, the range is anonymous memory and holds zeros."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """Map the range. SymError: there is no memory; the message names the model `name`."""
        self.num_bytes = max(1, -(-num_bytes // HUGE_BYTES)) * HUGE_BYTES
        try:
            self._mapping = mmap.mmap(-1, self.num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SymError(
                f"{name}: {num_bytes / 1e9:.1f} GB for the weights cannot be had: {error.strerror}", errno.ENOMEM
            ) from error
        advise_huge_pages(self._mapping)
        whole = np.frombuffer(self._mapping, dtype=np.uint8)
        skipped = -whole.ctypes.data % HUGE_BYTES
        self.array: ByteArray = whole[skipped : skipped + self.num_bytes]

    def show(self, view: FileView) -> None:
        """Replace the memory by the file of `view`, whose bytes the memory has or shall have.

        OSError: the kernel refuses the mapping. Then the memory is as it was.
        """
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _FIXED
        address = _libc.mmap(self.array.ctypes.data, self.num_bytes, mmap.PROT_READ, flags, view.fd, view.offset)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"mapping of weights: {os.strerror(ctypes.get_errno())}")
        weakref.finalize(self, os.close, os.dup(view.fd))  # the lock of the file lasts as long as its mapping

    def copy(self, view: FileView, checkpoint: Callable[[float], None]) -> None:
        """Copy the bytes of `view` into the memory. An exception from `checkpoint` ends the copying."""
        for first in range(0, self.num_bytes, _AT_ONCE_BYTES):
            checkpoint(first / self.num_bytes)
            self.array[first : first + _AT_ONCE_BYTES] = view.array[first : first + _AT_ONCE_BYTES]


class FileView:
    """A mapping of a file's bytes from `offset` on, to look at them before they become a `PanelMemory`."""

    def __init__(self, fd: int, offset: int, num_bytes: int) -> None:
        """Map the bytes of an open file, whose size the caller has checked. OSError: no mapping."""
        self.fd, self.offset = os.dup(fd), offset
        weakref.finalize(self, os.close, self.fd)
        self._mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        advise_huge_pages(self._mapping)
        self.array: ByteArray = np.frombuffer(self._mapping, dtype=np.uint8)

    def read(self, checkpoint: Callable[[float], None]) -> None:
        """Read the bytes into the page cache. OSError: the disk fails. An exception from `checkpoint` ends the reading.

        Kernels before 5.14 cannot read ahead for a mapping: they read when a step needs the bytes.
        """
        size = len(self.array)
        for first in range(0, size, _AT_ONCE_BYTES):
            checkpoint(first / size)
            num_bytes = min(_AT_ONCE_BYTES, size - first)
            if not self._is_cached(first):
                gather_huge_pages(num_bytes)
            try:
                self._mapping.madvise(_POPULATE_READ, first, num_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return

    def _is_cached(self, at: int) -> bool:
        """Return whether a byte is in the page cache, or cannot be read at all: then no huge pages are of use."""
        try:
            return bool(os.preadv(self.fd, [bytearray(1)], self.offset + at, os.RWF_NOWAIT))
        except OSError as error:
            return error.errno != errno.EAGAIN

    def is_huge(self) -> bool:
        """Return whether so many bytes are in huge pages that steps are as fast as from anonymous memory."""
        return huge_file_bytes(self.array.ctypes.data) > HUGE_SHARE * len(self.array)


def gather_huge_pages(num_bytes: int) -> None:
    """Have the kernel gather free huge pages of this size, for the page cache to take.

    The kernel moves other pages out of the way for anonymous memory, but not for the page cache. Without this function,
    a file of 4.5 GB got huge pages for less than three quarters of it while old files filled the memory.
    """
    with mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        advise_huge_pages(mapping)
        with contextlib.suppress(OSError):  # the memory is short, or the kernel is older than 5.14
            mapping.madvise(_POPULATE_WRITE)


def huge_file_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Return the bytes of a file that the mapping at `address` has in huge pages."""
    is_wanted = False
    for line in smaps.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if not key.endswith(":"):
            first, _, end = key.partition("-")
            is_wanted = int(first, 16) <= address < int(end, 16)
        elif is_wanted and key == "FilePmdMapped:":
            return int(value.split()[0]) * 1024
    return 0
