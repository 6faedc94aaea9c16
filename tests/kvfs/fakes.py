"""A small real page store and a made-up model: what `kvfs` needs from a decoder, without one."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfs.fs import DirectoryEntry as Listed
from kvfs.fs import FileSystem
from kvfs.images.format import ImageFormat
from kvfs.images.header import ByteSource, parse_header
from kvfs.images.importer import ImageImport
from kvfs.names.inode import Credentials
from kvfs.pages.assemble import Assembly, SourceRanges
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool, pages_for
from kvfs.pages.table import PageTable, Reservation
from libsym.abi import PAGE_ENTRIES


def fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fake_identity(name: str = "fake") -> dict[str, str]:
    return {
        "model": fingerprint(name),
        "tokenizer": fingerprint("tokenizer of " + name),
        "rope": "theta=10000",
        "precision": "F32",
        "layout": "k=entry,dim v=entry,dim",
    }


@dataclass(frozen=True)
class FakeFacts:
    """A model whose page is 4 KiB. `head_dim` and the rest make it larger."""

    layers: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    vocab_size: int = 1000
    max_positions: int = 100_000
    dtype: str = "F32"
    name: str = "fake"
    identity: dict[str, str] = field(default_factory=fake_identity)

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        return (self.layers, 2, self.kv_heads, PAGE_ENTRIES * self.head_dim)


class FakeStore:
    """Pages of float32 in one lazily committed array, entry after entry within a head: the natural layout."""

    def __init__(self, facts: FakeFacts, num_pages: int) -> None:
        self.pages = np.zeros((num_pages, *facts.page_shape), np.float32)
        self.num_pages = num_pages
        self.page_bytes = math.prod(facts.page_shape) * 4
        self._bytes = self.pages.data.cast("B")
        # [page, layer, k or v, head, entry, dim]
        self.entries = self.pages.reshape(num_pages, facts.layers, 2, facts.kv_heads, PAGE_ENTRIES, facts.head_dim)
        self.num_zeroed = 0
        self.worker_page_s = 0.0
        """Time that a worker thread takes for a page, as if pages were large or the machine slow."""
        self.num_worker_pages = 0

    def view(self, page: int, count: int = 1) -> memoryview:
        if self.worker_page_s and threading.current_thread() is not threading.main_thread():
            self.num_worker_pages += 1
            time.sleep(self.worker_page_s)
        assert 0 <= page <= self.num_pages - count
        return self._bytes[page * self.page_bytes : (page + count) * self.page_bytes].toreadonly()

    def writable(self, page: int) -> memoryview:
        self.view(page)
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def copy(self, source: int, target: int, num_entries: int = PAGE_ENTRIES) -> None:
        """Copy entries, for the fake decoder."""
        self.entries[target, :, :, :, :num_entries] = self.entries[source, :, :, :, :num_entries]

    def zero(self, page: int) -> None:
        self.pages[page] = 0
        self.num_zeroed += 1

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        entries = np.frombuffer(data, np.float32).reshape(self.entries.shape[1:]).copy()
        entries[:, :, :, num_entries:] = 0
        return entries.tobytes()

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Here a key moves by adding the shift to it."""
        filled = np.zeros_like(self.entries[target])
        filled[:, :, :, : len(slots)] = self.entries[sources, :, :, :, slots].transpose(1, 2, 3, 0, 4)
        filled[:, 0, :, : len(slots)] += shifts[:, None].astype(np.float32)
        self.entries[target] = filled


def entry_value(previous: float, token: int, position: int) -> float:
    """The fake decoder's value of an entry: through the entry before, the value depends on all before, as KV does."""
    mixed = hashlib.blake2b(f"{previous} {token} {position}".encode(), digest_size=3)
    return float(1 + int.from_bytes(mixed.digest(), "little") // 2)  # exact in float32, with room for the ramp


def entry_values(entries: Sequence[tuple[int, int]]) -> list[float]:
    """Values that `FakeDecoder` leaves in the pages of a file with these (token, position) entries."""
    values = [0.0]
    for token, position in entries:
        values.append(entry_value(values[-1], token, position))
    return values[1:]


class FakeDecoder:
    """Fills reserved entries as a step would: zeros and copies first, then entry by entry, from what the pages hold."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        shape = store.entries.shape
        width = shape[1] * shape[2] * shape[3] * shape[5]
        # [layer, k or v, head, dim]: no two numbers of an entry are alike
        self.ramp = np.arange(width, dtype=np.float32).reshape(shape[1], shape[2], shape[3], shape[5])

    def step(self, reservation: Reservation) -> None:
        for page in reservation.pages_to_zero(reservation.tokens.size):
            reservation.table.pool.store.zero(page)
        for source, target, count in reservation.frame_copies().reshape(-1, 3).tolist():
            self.store.copy(source, target, count)
        pages, start = reservation.frames(), reservation.start
        previous = float(self.moved_entries(pages[: pages_for(start)], start)[0][-1]) if start else 0.0
        new = zip(reservation.tokens.tolist(), reservation.positions.tolist(), strict=True)
        for index, (token, position) in enumerate(new, start):
            previous = entry_value(previous, token, position)
            self.store.entries[pages[index // PAGE_ENTRIES], :, :, :, index % PAGE_ENTRIES] = previous + self.ramp

    def entries(self, pages: IntArray, num_entries: int) -> npt.NDArray[np.float32]:
        """The value of each entry, as it lies in the pages; every number of it is looked at."""
        values, moved = self.moved_entries(pages, num_entries)
        assert not moved.any(), "a key was moved"
        return values

    def moved_entries(
        self, pages: IntArray, num_entries: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The same of entries that may have been moved, and by how many positions each was."""
        data = self.store.entries[pages].transpose(0, 4, 1, 2, 3, 5)  # [page, entry, layer, k or v, head, dim]
        data = data.reshape(-1, *self.ramp.shape)[:num_entries] - self.ramp
        values, keys = data[:, 0, 1, 0, 0], data[:, 0, 0, 0, 0]
        assert (data[:, :, 1] == values[:, None, None, None]).all(), "an entry was written in part"
        assert (data[:, :, 0] == keys[:, None, None, None]).all(), "an entry was written in part"
        return values, keys - values

    def append(self, table: PageTable, tokens: Sequence[int], position: int | None = None) -> None:
        """Make a whole call: reserve, run, commit."""
        first = table.next_position if position is None else position
        reservation = table.reserve(tokens, range(first, first + len(tokens)))
        self.step(reservation)
        commit_all(reservation)


class BytesSource:
    """An image to import that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def read_into(self, offset: int, room: memoryview) -> int:
        data = self.read_at(offset, len(room))
        room[: len(data)] = data
        return len(data)


def commit_all(reservation: Reservation) -> None:
    """Commit as a step does that computed all of it."""
    reservation.commit_first(reservation.tokens)


def import_image(pool: PagePool, image_format: ImageFormat, source: ByteSource, owner: int) -> PageTable:
    """Make an import in one thread: the table of a whole, valid image, or an error and nothing changed."""
    incoming = ImageImport(pool, parse_header(image_format, source), owner)
    try:
        incoming.load(source)
    except BaseException:
        incoming.abandon()
        raise
    return incoming.finish()


def listing(fs: FileSystem, creds: Credentials, path: str) -> list[Listed]:
    """Content of a directory, by name, as the gate finds it."""
    return [fs.entry(name, inode) for name, inode in sorted(fs.directory(creds, path).entries.items())]


def allocate(pool: PagePool, count: int, owner: int) -> IntArray:
    """New pages of zeros, or of bytes that `owner` left there."""
    pages = pool.allocate(count, owner)
    stale = pages[pool.owners_of(pages) != owner]
    for page in stale.tolist():
        pool.store.zero(page)
    pool.claim(stale, owner)
    return pages


def assemble(
    pool: PagePool, owner: int, pieces: Sequence[SourceRanges], *, rebase: bool, max_positions: int
) -> PageTable:
    """A table of entries of others, made in one thread; or an error, and nothing changed."""
    assembly = Assembly(pool, owner, pieces, rebase=rebase, max_positions=max_positions)
    try:
        assembly.plan()
        assembly.reserve()
        assembly.fill()
    except BaseException:
        assembly.abandon()
        raise
    return assembly.finish()
