"""What plain programs get from a disk: O_DIRECT, pieces of 8 MiB, fdatasync; and what fio gets."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from pathlib import Path

PIECE = 8 << 20
BLOCK = 4096


def _aligned(data: bytes) -> mmap.mmap:
    room = mmap.mmap(-1, len(data))
    room.write(data)
    return room


_BYTES = _aligned(os.urandom(PIECE))


def _direct(path: Path, flags: int) -> int:
    """Past the page cache where the file system can; as Symphony does it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def plain_write(path: Path, num_bytes: int) -> None:
    """A new file, on disk when this returns."""
    descriptor = _direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for offset in range(0, num_bytes, PIECE):
        os.pwrite(descriptor, memoryview(_BYTES)[: min(PIECE, num_bytes - offset)], offset)
    os.fdatasync(descriptor)
    os.close(descriptor)


def plain_append(path: Path) -> None:
    """A small record that is on disk: what a commit is at least."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, memoryview(_BYTES)[:BLOCK])
    os.fsync(descriptor)
    os.close(descriptor)


def plain_read(path: Path, *, keeps: bool = False) -> None:
    """`keeps`: each byte into memory that was not used before, as what opens a file does; else into the same 8 MiB."""
    size = path.stat().st_size
    descriptor, room = (
        _direct(path, os.O_RDONLY),
        memoryview(mmap.mmap(-1, -(-size // PIECE) * PIECE if keeps else PIECE)),
    )
    for offset in range(0, size, PIECE):
        os.preadv(descriptor, [room[offset:][:PIECE] if keeps else room], offset)
    os.close(descriptor)


def fio_rate(path: Path, num_bytes: int, way: str) -> float:
    """MB/s."""
    how = ["--direct=1", "--bs=8M", "--ioengine=psync", "--end_fsync=1", "--output-format=json"]
    command = ["fio", "--name=x", f"--filename={path}", f"--size={num_bytes}", f"--rw={way}", *how]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"]) / 1e6
