"""Rates of pages between memory and disk: the real storage and arena in this process, without a daemon or a decoder."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import trio

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
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
"""SmolLM2-135M's: pages of 720 KiB in bfloat16."""


class Here:
    """A volume over a state, as a daemon has it; a file's bytes are drawn instead of computed."""

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
        for frame in range(num_pages):  # new memory comes at a third of the disk's rate, once
            self.arena.zero(frame)

    def make(self, path: str, num_pages: int, seed: int) -> OpenKv:
        """A file of so many full pages."""
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
    """MB/s of swap-out, swap-in, and of the disk itself, round by round in turns."""
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
                await here.keeper.sync_all()  # its slots are free
                await here.keeper.jobs.idle()
                if number:  # the first round makes the file of slots
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


class Peer:
    """What a plain program gets from the same disk: O_DIRECT, pieces of a job's size, from and to huge pages that were
    used before; with one thread or three, whichever is faster.
    """

    def __init__(self, path: Path, num_bytes: int, piece: int) -> None:
        self.num_bytes = num_bytes
        self._piece = piece
        self._path = path
        self._memory = huge_memory(num_bytes)
        self._memory[:] = b"s" * num_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.rate(self.write)

    def write(self, offset: int) -> None:
        os.pwrite(self._descriptor, self._memory[offset : offset + self._piece], offset)

    def read(self, offset: int) -> None:
        os.preadv(self._descriptor, [self._memory[offset : offset + self._piece]], offset)

    def rate(self, way: Callable[[int], None], *, is_new: bool = False) -> float:
        """MB/s. `is_new`: the file system has to find the room first, as for slots that were given back to it."""
        found = []
        for num_threads in (1, 3):
            if is_new:
                os.ftruncate(self._descriptor, 0)
                os.posix_fallocate(self._descriptor, 0, self.num_bytes)
            with ThreadPoolExecutor(num_threads) as threads:
                began_s = time.perf_counter()
                list(threads.map(way, range(0, self.num_bytes, self._piece)))
                found.append(self.num_bytes / (time.perf_counter() - began_s) / 1e6)
        return max(found)

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


def huge_memory(num_bytes: int) -> memoryview:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def copy_rates(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """MB/s of pages copied from frame to frame in any order, as the storage copies what does not lie as the disk wants
    it, beside memcpy of the same pages.
    """
    config = tiny_config(num_layers=LAYERS, num_kv_heads=KV_HEADS, num_heads=3 * KV_HEADS, head_dim=HEAD_DIM)
    num_pages = 2 * num_bytes // Arena(config, 1, "BF16").page_bytes
    arena = Arena(config, num_pages, "BF16")
    for frame in range(num_pages):
        arena.zero(frame)
    order = np.random.default_rng(0).permutation(num_pages)
    pairs = list(zip(order[: num_pages // 2].tolist(), order[num_pages // 2 :].tolist(), strict=False))
    address = arena.pages.ctypes.data

    def by_frames(source: int, target: int) -> None:
        np.copyto(np.frombuffer(arena.writable(target), np.uint8), np.frombuffer(arena.view(source), np.uint8))

    def by_memcpy(source: int, target: int) -> None:
        size = arena.page_bytes
        ctypes.memmove(address + target * size, address + source * size, size)

    rates: dict[str, list[float]] = {"frames": [], "memcpy": []}
    for number in range(rounds + 1):
        for what, way in (("frames", by_frames), ("memcpy", by_memcpy)):
            began_s = time.perf_counter()
            for pair in pairs:
                way(*pair)
            rate = len(pairs) * arena.page_bytes / (time.perf_counter() - began_s) / 1e6
            if number:
                rates[what].append(rate)
    return rates
