"""Rates of disk.py that need no daemon: rates of the storage for pages, and rates of plain programs."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
import trio
from harness import seconds_of

from decoder.cpu.arena import Arena
from decoder.tiny import tiny_config
from kvfs.durable.journal import Journal
from kvfs.durable.keeper import Keeper
from kvfs.durable.slot_file import SLOTS_A_JOB
from kvfs.durable.state import State
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import Credentials
from kvfs.pages.accounts import Accounts
from kvfs.pages.pool import PagePool, num_pages_of
from libsym.abi import PAGE_ENTRIES
from tests.kvfs.fakes import FakeFacts, commit_all

ROOT = Credentials(0, 0)
PIECE = 8 << 20
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
"""Shape of SmolLM2-135M, whose pages have 720 KiB in bfloat16."""


class Here:
    """A file system with its state directory, as in a daemon. The bytes of files are random instead of computed."""

    def __init__(self, directory: Path, num_pages: int) -> None:
        facts = FakeFacts(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="BF16", max_positions=1 << 30)
        config = tiny_config(num_layers=LAYERS, num_kv_heads=KV_HEADS, num_heads=3 * KV_HEADS, head_dim=HEAD_DIM)
        self.state = State(directory)
        kept = self.state.load()
        self.arena = Arena(config, num_pages, "BF16")
        num_numbers = num_pages_of(num_pages, 0, 3 * num_pages)
        pool = PagePool(
            self.arena, Accounts(num_numbers, self.arena.page_bytes), 0, 0, 3 * num_pages, lambda: self.keeper
        )
        journal = Journal(lambda: self.fs.volume.tree)
        self.fs = FileSystem(pool, facts, self.state.files, 0, 0, changes=journal)
        self.keeper = Keeper(self.state, kept, self.fs.volume, journal)
        for frame in range(num_pages):  # the first use of new memory is slow: a third of the disk's rate
            self.arena.zero(frame)

    def make(self, path: str, num_pages: int, seed: int) -> OpenKv:
        """Make a file of `num_pages` full pages."""
        file = self.fs.kv_create(ROOT, path)
        count = num_pages * PAGE_ENTRIES
        reservation = self.fs.reserve(file, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
        data = np.random.default_rng(seed).bytes(self.arena.page_bytes)
        for frame in reservation.frames().tolist():
            self.arena.writable(frame)[:] = data
        commit_all(reservation)
        self.fs.committed(file)
        return file


async def _timed(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    await function()  # type: ignore[misc]
    return time.perf_counter() - began_s


def swap_rates(directory: Path, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Measure MB/s of swap-out, swap-in and the disk itself, in turns, for each round."""
    rates: dict[str, list[float]] = {}

    async def live() -> None:
        probe = FakeFacts(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="BF16")
        page_bytes = 2 * int(np.prod(probe.page_shape))
        num_pages = num_bytes // page_bytes
        here = Here(directory / "state", num_pages + num_pages // 16 + 8)
        peer = Peer(directory / "peer", num_pages * page_bytes, SLOTS_A_JOB * page_bytes)
        pager = here.fs.volume.pager
        async with trio.open_nursery() as nursery:
            await nursery.start(here.keeper.run)
            for number in range(rounds + 1):
                path = f"{number}.kv"
                file = here.make(path, num_pages, number)
                before = here.keeper.statistics()
                out_s = await _timed(lambda file=file: pager.put_on_disk(file.table))  # type: ignore[misc]
                peer_out, peer_new = peer.rate(peer.write), peer.rate(peer.write, is_new=True)
                in_s = await _timed(lambda file=file: pager.put_in_memory(file.table))  # type: ignore[misc]
                peer_in = peer.rate(peer.read)
                after = here.keeper.statistics()
                assert after.read_bytes - before.read_bytes == peer.num_bytes
                here.fs.kv_remove(ROOT, path)
                here.fs.kv_close(file)
                await here.keeper.sync_all()  # frees the slots of the file
                await here.keeper.jobs.idle()
                if number:  # the first round only creates the file of slots
                    for what, rate in (
                        ("out", peer.num_bytes / out_s / 1e6),
                        ("in", peer.num_bytes / in_s / 1e6),
                        ("disk out", peer_out),
                        ("disk new", peer_new),
                        ("disk in", peer_in),
                    ):
                        rates.setdefault(what, []).append(rate)
            nursery.cancel_scope.cancel()
        peer.close()
        here.keeper.close()

    trio.run(live)
    return rates


@cache
def random_piece() -> memoryview:
    piece = huge_memory(PIECE)
    piece[:] = os.urandom(PIECE)
    return piece


def direct(path: Path, flags: int) -> int:
    """Open a file with O_DIRECT if the file system supports it, as Symphony does."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def plain_write(path: Path, num_bytes: int) -> None:
    """Write a new file past the page cache, and return when it is on disk."""
    path.unlink(missing_ok=True)
    descriptor, piece = direct(path, os.O_WRONLY | os.O_CREAT), random_piece()
    for offset in range(0, num_bytes, PIECE):
        os.pwrite(descriptor, piece[: min(PIECE, num_bytes - offset)], offset)
    os.fdatasync(descriptor)
    os.close(descriptor)


def plain_append(path: Path) -> None:
    """Append a small record and sync it. No commit can cost less than this."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, bytes(4096))
    os.fsync(descriptor)
    os.close(descriptor)


def plain_read(path: Path) -> None:
    """Read a file past the page cache into new memory, as the daemon does when a program opens a KV file."""
    size, descriptor = path.stat().st_size, direct(path, os.O_RDONLY)
    room = memoryview(mmap.mmap(-1, -(-size // PIECE) * PIECE))
    for offset in range(0, size, PIECE):
        os.preadv(descriptor, [room[offset:][:PIECE]], offset)
    os.close(descriptor)


class Peer:
    """Rates of a plain program on the same disk, with O_DIRECT and pieces of the size that a disk job has.

    The program's memory is huge pages that were used before. Of two rates, with one thread and with three, the better
    one counts.
    """

    def __init__(self, path: Path, num_bytes: int, piece: int) -> None:
        self.num_bytes = num_bytes
        self._piece = piece
        self._path = path
        self._memory = huge_memory(num_bytes)
        self._memory[:] = b"s" * num_bytes
        self._descriptor = direct(path, os.O_RDWR | os.O_CREAT)
        self.rate(self.write)

    def write(self, offset: int) -> None:
        os.pwrite(self._descriptor, self._memory[offset : offset + self._piece], offset)

    def read(self, offset: int) -> None:
        os.preadv(self._descriptor, [self._memory[offset : offset + self._piece]], offset)

    def rate(self, way: Callable[[int], None], *, is_new: bool = False) -> float:
        """Return MB/s. With `is_new` the file system first allocates blocks, as for slots whose blocks were freed."""
        found = []
        for num_threads in (1, 3):
            if is_new:
                os.ftruncate(self._descriptor, 0)
                os.posix_fallocate(self._descriptor, 0, self.num_bytes)
            with ThreadPoolExecutor(num_threads) as threads:
                offsets = range(0, self.num_bytes, self._piece)
                took_s = seconds_of(partial(list, threads.map(way, offsets)))
                found.append(self.num_bytes / took_s / 1e6)
        return max(found)

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


def huge_memory(num_bytes: int) -> memoryview:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
