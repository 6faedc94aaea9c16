"""Random work on a house whose memory is much too small, several workers at a time: each waits for its pages.

A *life* is a daemon's. In it workers do operations: calls that wait for pages, compute, and end in every way; files
that are made, forked, cut, renamed and removed; readers; syncs; moves between memory and disk by advice. The model is
told of each as it ends. When the workers have ended, every file is compared with it, bit for bit, and the books are
looked at. Then the daemon is cut off, or drained, and the next life begins with what is on disk.
"""

import errno
import random
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import trio

from kvfs.images.snapshot import Snapshot
from kvfs.pages.looking import copies, look
from kvfs.pages.table import PageTable, Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError
from tests.disk.recorder import Disk
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.durable.storm_files import Lost, Mine, bytes_of, check_after_cut, check_all
from tests.kvfs.fakes import commit_all

NUM_FRAMES = 32
NUM_ON_DISK = 600
PAGE_BYTES = 4096
MAX_FILES = 80
MAX_ENTRIES = 7 * PAGE_ENTRIES
NUM_WORKERS = 8
CHECKS_EACH = 500
"""Operations between two looks at the books."""
STUCK_S = 60.0
"""Time after which a wait is a deadlock."""
EXPECTED = {errno.ENOSPC, errno.EBUSY}
"""Errors that a sound disk may give to operations."""
COUNTS = (1, 1, 1, 1, 2, 5, 31, 32, 33, 70)


class Storm:
    """A state directory, and the files that have to be in it."""

    def __init__(self, directory: Path, seed: int, disk: Disk | None = None, *, without: Collection[str] = ()) -> None:
        """`disk`: what the directory lies on, if that is to fail and hang now and then; `without` these operations."""
        self.rng = random.Random(seed)
        self.files: list[Mine] = []
        self.counts: Counter[str] = Counter()
        self.num_done = 0
        self._directory = directory
        self._disk = disk
        self._num_names = 0
        self._gone: list[Mine] = []
        """Files without a name and without a handle, which a crash may bring back."""
        self._left = 0
        self._house: House | None = None
        self._table = [(weight, getattr(self, f"_{name}")) for name, weight in WEIGHTS.items() if name not in without]
        self._progress_s = 0.0

    @property
    def house(self) -> House:
        assert self._house is not None, "there is no daemon"
        return self._house

    # Lives

    async def lives(self, num_operations: int, num_lives: int) -> None:
        """Do `num_operations` in `num_lives` lives; then remove everything."""
        for number in range(num_lives):
            await self.life(num_operations // num_lives, ends_hard=self.rng.random() < 0.6 or number == 0)
        await self.remove_all()

    async def life(self, num_operations: int, *, ends_hard: bool) -> None:
        """Do `num_operations` on one daemon, which is then cut off in the middle of more, or drained."""
        pressure = Pressure(self.rng)
        self._house = House(
            self._directory,
            num_pages=NUM_FRAMES,
            num_on_disk=NUM_ON_DISK,
            deadline_s=0.5 if self._disk else 30.0,
            pressure=lambda: pressure,
        )
        self.files = check_after_cut(self.house, self.files)
        async with running(self.house):
            await check_all(self.house, self.files)
            await self._work(num_operations)
            await self._come_to_rest()
            await check_all(self.house, self.files)
            self.house.fs.check()
            if ends_hard:
                await self._work(num_operations // 20, is_cut=True)
            else:
                self.house.keeper.limit(None, 30.0)
                assert await self.house.keeper.drain() == []
                for mine in self.files:
                    mine.promised, mine.cut = len(mine.entries), []
        self._count_moves()
        named = [mine for mine in self.files if mine.path is not None]
        self.files, self._gone = [*self.files, *self._gone] if ends_hard else named, []

    async def remove_all(self) -> None:
        """Remove all files in one more life: nothing is left of them in memory or on disk."""
        house = self._house = House(self._directory, num_pages=NUM_FRAMES, num_on_disk=NUM_ON_DISK)
        self.files = check_after_cut(house, self.files)
        async with running(house, drain=True):
            await check_all(house, self.files)
            for mine in self.files:
                assert mine.path is not None
                house.fs.kv_remove(ROOT, mine.path)
            await house.keeper.sync_all()
            await house.keeper.jobs.idle()
            pool = house.fs.pool
            if pool.num_free != pool.num_pages or pool.store.free.count != pool.num_frames:
                raise Lost("all files are removed, and pages are not free")
            if house.keeper.statistics().disk_bytes:
                raise Lost(f"all files are removed, and {house.keeper.statistics().disk_bytes} bytes are on disk")

    def _count_moves(self) -> None:
        figures = self.house.volume.pager.statistics()
        for name in ("num_in", "num_out", "num_dropped", "num_waits", "num_hints"):
            self.counts[name] += getattr(figures, name)

    async def _work(self, num_operations: int, *, is_cut: bool = False) -> None:
        self._left, self._progress_s = num_operations, trio.current_time()
        async with trio.open_nursery() as helpers:
            helpers.start_soon(self._watch)
            if self._disk is not None:
                helpers.start_soon(self._trouble, self._disk)
            async with trio.open_nursery() as nursery:
                for _ in range(NUM_WORKERS):
                    nursery.start_soon(self._worker)
                if is_cut:
                    while self._left > 0:  # noqa: ASYNC110 - a soak's own pace
                        await trio.sleep(0.002)
                    nursery.cancel_scope.cancel()
            helpers.cancel_scope.cancel()
        if self._disk is not None:
            with trio.CancelScope(shield=True):
                await self._heal(self._disk)

    async def _watch(self) -> None:
        """Raise Lost when no operation ends for so long that it is a deadlock."""
        done = -1
        while True:
            if self.num_done != done:
                done, self._progress_s = self.num_done, trio.current_time()
            elif trio.current_time() - self._progress_s > STUCK_S:
                raise Lost(f"nothing has ended for {STUCK_S} s: {self.house.volume.pager.statistics()}")
            await trio.sleep(0.5)

    async def _come_to_rest(self) -> None:
        """Wait until all jobs have ended, and nobody keeps anything in memory."""
        house = self.house
        house.keeper.limit(None, 30.0)
        with trio.move_on_after(STUCK_S):
            while house.keeper.jobs.num_under_way or self._is_anything_needed():  # noqa: ASYNC110 - nothing tells of it
                await trio.sleep(0.002)
        if self._is_anything_needed():
            figures, pool = house.volume.pager.statistics(), house.fs.pool
            raise Lost(f"nobody computes, and pages are needed: {figures}, {np.flatnonzero(pool.pins[: pool.top])}")

    def _is_anything_needed(self) -> bool:
        pool, pager = self.house.fs.pool, self.house.volume.pager
        return bool(pager.statistics().num_waiting or pager.held() or pool.core.num_coming or pool.num_pinned)

    # A disk that fails

    async def _trouble(self, disk: Disk) -> None:
        while True:
            kind = self.rng.choice(("write", "fsync", "read", "hang", "full"))
            if kind == "hang":
                disk.hang(self.rng.choice(("write", "read", "fsync")), "*.slots", times=self.rng.randrange(1, 4))
            elif kind == "full":
                disk.limit(disk.used())
            else:
                disk.fail(kind, self.rng.choice(("*.slots", "*")), times=self.rng.randrange(1, 20))
            self.counts[f"trouble: {kind}"] += 1
            await trio.sleep(self.rng.uniform(0.01, 0.7))
            await self._heal(disk)
            await trio.sleep(self.rng.uniform(0.01, 0.1))

    async def _heal(self, disk: Disk) -> None:
        disk.heal()
        disk.limit(None)
        await trio.to_thread.run_sync(disk.resume)

    # Workers

    async def _worker(self) -> None:
        weights, functions = zip(*self._table, strict=True)
        while self._left > 0:
            self._left -= 1
            function = self.rng.choices(functions, weights)[0]
            try:
                await function()
            except SymError as error:
                if self._disk is None and error.errno not in EXPECTED:
                    raise Lost(f"{function.__name__} on a sound disk: {error}") from error
                self.counts[f"errno {error.errno}"] += 1
            self.num_done += 1
            self.counts[function.__name__] += 1
            if self.num_done % CHECKS_EACH == 0:
                self.house.fs.check()
            if self.num_done % 8 == 0:
                await trio.lowlevel.checkpoint()

    def _one(self, *, is_idle: bool = True, has_handle: bool = False, has_name: bool = False) -> Mine | None:
        """Return a random file of that kind; None: none was found."""
        for mine in self.rng.choices(self.files, k=6) if self.files else ():
            is_it = not (is_idle and mine.is_busy) and not (has_handle and mine.handle is None)
            if is_it and not (has_name and mine.path is None):
                return mine
        return None

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self.rng.randrange(1000)}-{self._num_names}.kv"

    # Calls

    async def _append(self) -> None:
        mine = self._one(has_handle=True)
        if mine is None:
            return
        count = self.rng.choice(COUNTS)
        if len(mine.entries) + count > MAX_ENTRIES:
            self._cut(mine, self.rng.randrange(len(mine.entries)))
        mine.is_busy = True
        try:
            await self._call(mine, [self.rng.randrange(1000) for _ in range(count)])
        finally:
            mine.is_busy = False

    async def _call(self, mine: Mine, tokens: Sequence[int]) -> None:
        house, handle = self.house, mine.handle
        assert handle is not None
        reservation = house.reserve(handle, tokens)
        is_over, errors = trio.Event(), list[SymError | None]()

        def then(error: SymError | None) -> None:
            errors.append(error)
            is_over.set()

        ticket = None
        try:
            ticket = house.volume.pager.acquire(reservation, self.rng.choice((-1, 0, 0, 0, 1)), then)
            if ticket is not None:
                gives_up_s = self.rng.uniform(0, 0.004) if self.rng.random() < 0.15 else STUCK_S
                with trio.move_on_after(gives_up_s):
                    await is_over.wait()
                if not errors and gives_up_s != STUCK_S:
                    self.counts["gave up"] += 1
                    house.volume.pager.cancel(ticket)
                    reservation.abort()
                    return
                self._require_pages(errors)
            await self._compute(mine, reservation)
        except BaseException:
            if reservation.is_open:
                if ticket is not None:
                    house.volume.pager.cancel(ticket)
                reservation.abort()
            raise

    def _require_pages(self, errors: Sequence[SymError | None]) -> None:
        if not errors:
            raise Lost(f"a call waits for ever: {self.house.volume.pager.statistics()}")
        for error in filter(None, errors):
            raise error

    async def _compute(self, mine: Mine, reservation: Reservation) -> None:
        """Compute as a member of the run: steps, then the member leaves, whatever has become of it."""
        house, handle, rng = self.house, mine.handle, self.rng
        assert handle is not None
        await self._some_time()
        if rng.random() < 0.1:
            with suppress(SymError):
                reservation.extend(rng.choice((1, 20)))
        house.decoder.step(reservation)
        await self._some_time()
        how = rng.random()
        if how < 0.1:
            reservation.abort()
            return
        if how < 0.3 and reservation.tokens.size > 1:
            done = reservation.tokens[: rng.randrange(1, reservation.tokens.size)].copy()
            reservation.commit_first(done)
            self._committed(mine, done.tolist())
            await self._some_time()
            if how < 0.2:
                reservation.abort()
                return
        rest = reservation.tokens.tolist()
        commit_all(reservation)
        self._committed(mine, rest)

    def _committed(self, mine: Mine, tokens: Sequence[int]) -> None:
        assert mine.handle is not None
        mine.append(tokens)
        self.house.fs.committed(mine.handle)

    async def _some_time(self) -> None:
        if self.rng.random() < 0.02:
            await trio.sleep(self.rng.uniform(0, 0.003))
        for _ in range(self.rng.randrange(3)):
            await trio.lowlevel.checkpoint()

    # Files

    async def _create(self) -> None:
        if len(self.files) >= MAX_FILES:
            await self._remove()
            return
        path = self._new_name() if self.rng.random() < 0.8 else None
        handle = self.house.fs.kv_create(ROOT, path)
        self.files.append(Mine(handle.inode, path, handle, []))

    async def _fork(self) -> None:
        source = self._one(is_idle=False, has_handle=True)
        if source is None or len(self.files) >= MAX_FILES:
            await self._remove()
            return
        assert source.handle is not None
        path = self._new_name() if self.rng.random() < 0.6 else None
        handle = self.house.fs.kv_fork(ROOT, source.handle, path)
        self.files.append(Mine(handle.inode, path, handle, list(source.entries)))

    async def _close(self) -> None:
        mine = self._one(has_handle=True)
        if mine is not None and mine.handle is not None:
            self.house.fs.kv_close(mine.handle)
            mine.handle = None
            if mine.path is None:
                self.files.remove(mine)
                self._gone.append(mine)

    async def _open(self) -> None:
        mine = self._one(has_name=True)
        if mine is not None and mine.handle is None and mine.path is not None:
            mine.handle = self.house.fs.kv_open(ROOT, mine.path, write=True)

    async def _remove(self) -> None:
        mine = self._one(has_name=True)
        if mine is not None and mine.path is not None:
            self.house.fs.kv_remove(ROOT, mine.path)
            self._lost_its_name(mine)

    def _lost_its_name(self, mine: Mine) -> None:
        mine.path = None
        if mine.handle is None:
            self.files.remove(mine)
            self._gone.append(mine)

    async def _rename(self) -> None:
        mine = self._one(is_idle=False, has_name=True)
        other = self._one(has_name=True)
        if mine is None or mine.path is None:
            return
        path = self._new_name()
        if other is not None and other is not mine and other.path is not None and self.rng.random() < 0.3:
            path = other.path
        else:
            other = None
        self.house.fs.kv_rename(ROOT, mine.path, path)
        mine.path = path
        if other is not None:
            self._lost_its_name(other)

    async def _truncate(self) -> None:
        mine = self._one(has_handle=True)
        if mine is not None and mine.entries:
            length = self.rng.randrange(len(mine.entries))
            self._cut(mine, length // PAGE_ENTRIES * PAGE_ENTRIES if self.rng.random() < 0.4 else length)

    def _cut(self, mine: Mine, length: int) -> None:
        assert mine.handle is not None
        self.house.fs.kv_truncate(mine.handle, length)
        mine.truncate(length, self.num_done)

    async def _assemble(self) -> None:
        """Extract some ranges of a file, or merge several; others wait for pages meanwhile."""
        sources = [mine for mine in (self._one(is_idle=False, has_handle=True) for _ in range(3)) if mine is not None]
        rebase, path = self.rng.random() < 0.5, self._new_name() if self.rng.random() < 0.7 else None
        if not sources or len(self.files) >= MAX_FILES:
            return
        fs, handles = self.house.fs, [mine.handle for mine in sources if mine.handle is not None]
        if self.rng.random() < 0.5:
            length = len(sources[0].entries)
            ranges = sorted(self.rng.randrange(length + 1) for _ in range(4))
            entries = [each for first in (0, 2) for each in sources[0].entries[ranges[first] : ranges[first + 1]]]
            assembly = fs.begin_extract(ROOT, handles[0], np.array(ranges).reshape(2, 2), path, 0o600, rebase=rebase)
        else:
            entries = [each for mine in sources for each in mine.entries]
            assembly = fs.begin_merge(ROOT, handles, path, 0o600, rebase=rebase)
        handle = await self.house.assemble(assembly, path)
        if rebase:
            entries = [(token, at, value, by + at - was) for at, (token, was, value, by) in enumerate(entries)]
        self.files.append(Mine(handle.inode, path, handle, entries))

    # Readers

    async def _look(self) -> None:
        mine = self._one()
        if mine is None:
            return
        mine.is_busy = True
        try:
            async with self.house.volume.pager.hold([mine.table]):
                await self._some_time()
                mine.check_tokens(mine.table)
                mine.check(self.house, len(mine.entries))
        finally:
            mine.is_busy = False

    async def _read_image(self) -> None:
        """Read an image as a reader of the mount does, while the file may change in any way."""
        mine = self._one(is_idle=False)
        if mine is None or not mine.entries:
            return
        entries = list(mine.entries)
        snapshot = self.house.volume.open_snapshot(mine.content)
        try:
            with trio.CancelScope(shield=True):
                found = await trio.to_thread.run_sync(partial(_pages_of, snapshot))
        finally:
            self.house.volume.close_snapshot(snapshot)
        for number, page in enumerate(found):
            wanted = bytes_of(self.house.decoder, entries[number * PAGE_ENTRIES : (number + 1) * PAGE_ENTRIES])
            if page != wanted:
                raise Lost(f"{mine}: a reader sees other bytes in page {number} of {len(found)}")

    # The disk

    async def _sync(self) -> None:
        mine = self._one(is_idle=False, has_name=True)
        if mine is not None:
            await self._synced([mine], self.house.keeper.sync(mine.inode))

    async def _sync_all(self) -> None:
        await self._synced([mine for mine in self.files if mine.path is not None], self.house.keeper.sync_all())

    async def _synced(self, files: Sequence[Mine], sync: Awaitable[None]) -> None:
        begun = [(mine, mine.begin_sync(self.num_done)) for mine in files]
        try:
            await sync
            for mine, each in begun:
                if mine.path is not None:  # nothing is promised of what has lost its name meanwhile
                    mine.synced(each)
        finally:
            for mine, each in begun:
                mine.syncs.remove(each)

    async def _limit(self) -> None:
        """Allow less on disk, or more, or set no bounds."""
        limit_bytes = self.rng.choice((None, None, self.rng.randrange(NUM_FRAMES, 300) * PAGE_BYTES))
        self.house.keeper.limit(limit_bytes, self.house.keeper.jobs.deadline_s)

    # Advice

    def _any_table(self) -> list[PageTable]:
        """Return a table, if there is a file."""
        mine = self._one(is_idle=False)
        return [] if mine is None else [mine.table]

    async def _put_on_disk(self) -> None:
        for table in self._any_table():
            with trio.move_on_after(self.rng.choice((0.002, 0.5))):
                await self.house.volume.pager.put_on_disk(table)

    async def _put_in_memory(self) -> None:
        for table in self._any_table():
            with trio.move_on_after(self.rng.choice((0.002, 0.5))):
                await self.house.volume.pager.put_in_memory(table)

    async def _will_need(self) -> None:
        for table in self._any_table():
            self.house.volume.pager.will_need(table)

    async def _demote(self) -> None:
        for table in self._any_table():
            self.house.volume.pager.demote(table)

    async def _pin(self) -> None:
        pager = self.house.volume.pager
        for table in self._any_table():
            pager.pin_file(table, pager.clock() + self.rng.uniform(0, 0.1))

    async def _unpin(self) -> None:
        for table in self._any_table():
            self.house.volume.pager.unpin_file(table)

    async def _policy(self) -> None:
        """Rank files by their last use, the other way round, or by chance."""
        sign = self.rng.choice((1, -1, 0))
        random = np.random.default_rng(self.num_done)
        self.house.volume.pager.departures.use(
            lambda files, _gaps: sign * files.idle_s if sign else random.random(len(files))
        )


class Pressure:
    """Programs that are told, and have some time now and then."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        assert num_pages > 0
        assert not any(table.closed for table in tables)
        return self._rng.choice((0, 0, 0, 0.001, 0.01))


def _pages_of(snapshot: Snapshot) -> list[bytes]:
    """The pages of an image, for a worker."""
    pool, layout, num_full = snapshot.pool, snapshot.layout, snapshot.layout.num_entries // PAGE_ENTRIES
    full = [look(pool.store, pool.cold, np.array([page]), copies)[0] for page in snapshot.held_pages()[:num_full]]
    tail_at = layout.pages + num_full * snapshot.image_format.page_bytes
    return [*full, bytes(snapshot.read(tail_at, layout.tokens - tail_at))] if tail_at < layout.tokens else full


WEIGHTS = {
    "append": 50, "create": 4, "fork": 8, "close": 6, "open": 6, "remove": 2, "rename": 2, "truncate": 5, "assemble": 2,
    "look": 6, "read_image": 2, "sync": 1, "sync_all": 0.1, "limit": 0.2,
    "put_on_disk": 2, "put_in_memory": 2, "will_need": 4, "demote": 2, "pin": 2, "unpin": 1, "policy": 0.3,
}  # fmt: skip
"""Weights of the operations: how often each is done."""
