"""Random histories on plain files, after fsx: whatever order things happen in, the bytes are those of a plain model."""

import mmap
import os
import random
from pathlib import Path

import pytest

from tests.kvfs.mounted import Mount, needs_mount, opened

pytestmark = needs_mount

MAX_BYTES = 3 << 20
NUM_FILES = 3


class Bytes(bytearray):
    """Bytes that a file must hold."""

    def put(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self), offset))
        self[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        del self[size:]
        self.extend(bytes(size - len(self)))


class History:
    """Steps on a few files; each is done to the file and to its model, and both are compared."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._paths = [directory / f"f{i}" for i in range(NUM_FILES)]
        self._models = [Bytes() for _ in self._paths]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for path in self._paths]
        self.log: list[str] = []

    def run(self, num_steps: int) -> None:
        steps = [
            *(self.write, self.write, self.read, self.read, self.truncate, self.copy, self.copy, self.append),
            *(self.write_mapped, self.read_mapped, self.write_directly, self.read_directly, self.allocate, self.size),
            *(self.reopen, self.fork, self.rename, self.read_elsewhere, self.write_elsewhere, self.empty_by_opening),
        ]
        for number in range(num_steps):
            step = self._random.choice(steps)
            i = self._random.randrange(NUM_FILES)
            self.log.append(f"{number}: {step.__name__} file {i} of {len(self._models[i])} bytes")
            step(i)
        for i in range(NUM_FILES):
            self._expect(os.pread(self._files[i], MAX_BYTES * 2, 0), i, 0, MAX_BYTES * 2)
            assert self._paths[i].read_bytes() == bytes(self._models[i])

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def _range(self) -> tuple[int, int]:
        """An offset and a length, often at or beside a boundary."""
        offset = self._random.randrange(MAX_BYTES)
        boundary = self._random.choice([1, 1, 1, 512, 4096, 65536, 1 << 20])
        offset = offset // boundary * boundary + self._random.choice([0, 0, -1, 1]) * (boundary > 1)
        length = self._random.choice([1, 17, 4095, 4096, 4097, 65536, 65537, 300_000, 1 << 20])
        offset = max(0, offset)
        self.log[-1] += f", {length} at {offset}"
        return offset, min(length, MAX_BYTES - offset)

    def _expect(self, found: bytes, i: int, offset: int, length: int) -> None:
        wanted = self._models[i][offset : offset + length]
        if found != wanted:
            first = next((k for k, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
            raise AssertionError(f"{len(found)} bytes for {len(wanted)}, different from {first} on")

    def write(self, i: int) -> None:
        offset, length = self._range()
        data = self._random.randbytes(length)
        assert os.pwrite(self._files[i], data, offset) == length
        self._models[i].put(offset, data)

    def read(self, i: int) -> None:
        offset, length = self._range()
        self._expect(os.pread(self._files[i], length, offset), i, offset, length)

    def truncate(self, i: int) -> None:
        size, _ = self._range()
        if self._random.random() < 0.5:
            os.ftruncate(self._files[i], size)
        else:
            os.truncate(self._paths[i], size)
        self._models[i].resize(size)

    def append(self, i: int) -> None:
        data = self._random.randbytes(self._random.choice([1, 100, 5000]))
        if len(self._models[i]) + len(data) > MAX_BYTES:
            return
        with opened(self._paths[i], os.O_WRONLY | os.O_APPEND) as file:
            assert os.write(file, data) == len(data)
        self._models[i] += data

    def copy(self, i: int) -> None:
        j = self._random.randrange(NUM_FILES)
        source, length = self._range()
        target, _ = self._range()
        length = min(length, MAX_BYTES - target)
        if i == j and abs(source - target) < length:
            return
        expected = bytes(self._models[i][source : source + length])
        count = os.copy_file_range(self._files[i], self._files[j], length, source, target)
        assert count <= len(expected)
        assert count or not expected, "it may be short, but must get on"
        if count:
            self._models[j].put(target, expected[:count])

    def fork(self, i: int) -> None:
        """The whole file, as cp does it."""
        j = (i + 1) % NUM_FILES
        os.ftruncate(self._files[j], 0)
        done = 0
        while count := os.copy_file_range(self._files[i], self._files[j], 1 << 40, done, done):
            done += count
        self._models[j][:] = self._models[i]

    def write_mapped(self, i: int) -> None:
        offset, length = self._range()
        length = min(length, len(self._models[i]) - offset)
        if length <= 0:
            return
        data = self._random.randbytes(length)
        with mmap.mmap(self._files[i], 0) as mapping:
            mapping[offset : offset + length] = data
            if self._random.random() < 0.5:
                mapping.flush()
        self._models[i].put(offset, data)

    def read_mapped(self, i: int) -> None:
        offset, length = self._range()
        if self._models[i]:
            with mmap.mmap(self._files[i], 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                self._expect(mapping[offset : offset + length], i, offset, length)

    def write_directly(self, i: int) -> None:
        offset, length = (value // 4096 * 4096 for value in self._range())
        data = self._random.randbytes(length)
        with opened(self._paths[i], os.O_RDWR | os.O_DIRECT) as file, mmap.mmap(-1, max(length, 1)) as aligned:
            aligned[:length] = data
            assert os.pwritev(file, [memoryview(aligned)[:length]], offset) == length
        if length:
            self._models[i].put(offset, data)

    def read_directly(self, i: int) -> None:
        offset, length = (value // 4096 * 4096 for value in self._range())
        with opened(self._paths[i], os.O_RDONLY | os.O_DIRECT) as file, mmap.mmap(-1, length + 1) as aligned:
            count = os.preadv(file, [memoryview(aligned)[:length]], offset) if length else 0
            self._expect(aligned[:count], i, offset, length)

    def allocate(self, i: int) -> None:
        offset, length = self._range()
        if length:
            os.posix_fallocate(self._files[i], offset, length)
            self._models[i].resize(max(len(self._models[i]), offset + length))

    def size(self, i: int) -> None:
        size = len(self._models[i])
        assert os.fstat(self._files[i]).st_size == self._paths[i].stat().st_size == size

    def reopen(self, i: int) -> None:
        os.close(self._files[i])
        self._files[i] = os.open(self._paths[i], os.O_RDWR)

    def rename(self, i: int) -> None:
        """The handle goes with the file."""
        new = self._paths[i].with_name(f"{self._paths[i].name[:2]}{self._random.randrange(100)}")
        self._paths[i].rename(new)
        self._paths[i] = new

    def read_elsewhere(self, i: int) -> None:
        """Through another handle."""
        offset, length = self._range()
        with opened(self._paths[i]) as file:
            self._expect(os.pread(file, length, offset), i, offset, length)

    def write_elsewhere(self, i: int) -> None:
        offset, length = self._range()
        data = self._random.randbytes(length)
        with opened(self._paths[i], os.O_WRONLY) as file:
            assert os.pwrite(file, data, offset) == length
        self._models[i].put(offset, data)

    def empty_by_opening(self, i: int) -> None:
        if self._random.random() < 0.3:
            with opened(self._paths[i], os.O_WRONLY | os.O_TRUNC):
                self._models[i].resize(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_random_history_leaves_the_bytes_it_should(mount: Mount, seed: int) -> None:
    history = History(mount.path, seed)
    try:
        history.run(400)
    except BaseException:
        print("\n".join(history.log[-20:]))
        raise
    finally:
        history.close()
