"""Tensors in mapped files: rows that the kernel reads ahead."""

import os
import time

import numpy as np

from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor, map_file

ROWS, ROW_BYTES = 64, 1 << 16


def is_cached(fd: int, row: int) -> bool:
    try:
        return bool(os.preadv(fd, [bytearray(1)], 4 + row * ROW_BYTES, os.RWF_NOWAIT))
    except BlockingIOError:
        return False


def test_rows_that_are_read_ahead_come_into_memory_without_a_read(tmp_path):
    path = tmp_path / "tensors"
    path.write_bytes(bytes(4 + ROWS * ROW_BYTES))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    data = map_file(path)[4:]  # begins within a page
    tensor = StoredTensor("a", path, ENCODINGS["F32"], (ROWS, ROW_BYTES // 4), data)
    tensor.read_ahead(40, 44)
    until_s = time.monotonic() + 20
    while not all(is_cached(fd, row) for row in range(40, 44)):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    os.close(fd)


def test_rows_in_memory_need_not_be_read_ahead():
    tensor = StoredTensor.of_array("a", np.ones((ROWS, 8), np.float32))
    tensor.read_ahead(0, ROWS)
    out = np.empty((ROWS, 8), np.float32)
    tensor.read_into(out)
    assert out.all()
