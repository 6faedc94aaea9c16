"""fallocate(2) with its modes, which Python has not."""

import ctypes
import os

KEEP_SIZE, PUNCH_HOLE = 1, 2

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def allocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    if _fallocate(descriptor, mode, offset, size) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def punch(descriptor: int, offset: int, size: int) -> None:
    """Punch a hole: the bytes read as zeros."""
    allocate(descriptor, KEEP_SIZE | PUNCH_HOLE, offset, size)
