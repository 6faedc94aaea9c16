"""A volume over a state directory, with the fake store and decoder: opened, crashed, and opened again."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.durable.fsck import Report
from kvfs.durable.journal import Journal
from kvfs.durable.keeper import Keeper
from kvfs.durable.state import State
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.content import KvFile
from kvfs.names.disk import Disk
from kvfs.names.inode import Credentials, Inode
from kvfs.names.plain import PlainFile
from kvfs.pages.accounts import NO_LIMITS, AccountLimits, Accounts
from kvfs.pages.assemble import Assembly
from kvfs.pages.looking import Bytes, copies, look
from kvfs.pages.pool import PagePool, num_pages_of
from kvfs.pages.table import Reservation
from kvfs.tiers.tickets import NoPressure, Pressure
from libsym.errors import SymError
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore, commit_all, entry_values

ROOT = Credentials(0, 0)


def plain_of(inode: Inode) -> PlainFile:
    assert isinstance(inode.content, PlainFile)
    return inode.content


def names_after(directory: Path) -> list[str]:
    """Return the names that a daemon finds when it starts on this state."""
    house = House(directory)
    house.keeper.close()
    house.fs.check()
    return house.names()


class House:
    """File system, storage and decoder of one daemon's life over a state."""

    def __init__(
        self,
        directory: Path,
        facts: FakeFacts | None = None,
        *,
        num_pages: int = 64,
        bits: str = "fake",
        limits: AccountLimits = NO_LIMITS,
        deadline_s: float = 30.0,
        same_bits: bool = False,
        disk: Disk | None = None,
        num_on_disk: int = 0,
        disk_limit: int | None = None,
        a_cut: tuple[int, ...] = (),
        pressure: Callable[[], Pressure] = NoPressure,
    ) -> None:
        facts = facts or FakeFacts()
        self.state = State(directory)
        kept = self.state.load()
        num_own, num_others = kept.num_slots(self.state.identity_of(facts, kept))
        self.store = FakeStore(facts, num_pages)
        self.decoder = FakeDecoder(self.store)
        num_numbers = num_pages_of(num_pages, num_own, num_on_disk) + num_others
        accounts = Accounts(num_numbers, self.store.page_bytes, limits)
        pool = PagePool(self.store, accounts, num_own, num_others, num_on_disk, lambda: self.keeper)
        journal = Journal(lambda: self.tree, *a_cut)
        options: dict[str, Any] = {"bits": bits, "same_bits": same_bits, "pressure": pressure}
        self.fs = FileSystem(pool, facts, self.state.files, 0, 0, disk, changes=journal, **options)
        self.volume, self.tree = self.fs.volume, self.fs.volume.tree
        self.keeper = Keeper(self.state, kept, self.volume, journal, deadline_s, disk_limit)

    def append(self, file: OpenKv, tokens: Sequence[int]) -> None:
        """Append tokens as a step does."""
        reservation = self.reserve(file, tokens)
        self.decoder.step(reservation)
        commit_all(reservation)
        self.fs.committed(file)

    def reserve(self, file: OpenKv, tokens: Sequence[int]) -> Reservation:
        first = file.table.next_position
        return self.fs.reserve(file, tokens, range(first, first + len(tokens)))

    async def compute(self, file: OpenKv, tokens: Sequence[int]) -> None:
        """Compute tokens as a call does: wait for the pages, then for the step."""
        reservation = self.reserve(file, tokens)
        is_over, errors = trio.Event(), list[SymError | None]()

        def then(error: SymError | None) -> None:
            errors.append(error)
            is_over.set()

        try:
            if self.volume.pager.acquire(reservation, 0, then) is not None:
                await is_over.wait()
            _raise(errors)
        except BaseException:
            reservation.abort()
            raise
        self.decoder.step(reservation)
        commit_all(reservation)
        self.fs.committed(file)

    async def assemble(self, assembly: Assembly, path: str | None) -> OpenKv:
        """Make a file of an assembly, as the handler of KV_EXTRACT does."""
        try:
            await trio.to_thread.run_sync(assembly.plan)
            pages = assembly.pages_to_read()
            async with self.volume.pager.hold_pages(pages, assembly.num_new_pages, assembly.owner) as frames:
                assembly.reserve(frames)
                await trio.to_thread.run_sync(assembly.fill)
        except BaseException:
            self.volume.abandon_assembly(assembly)
            raise
        return self.fs.finish_assembly(ROOT, assembly, path, 0o600)

    def create(self, path: str, tokens: Sequence[int] = ()) -> OpenKv:
        file = self.fs.kv_create(ROOT, path)
        if tokens:
            self.append(file, tokens)
        return file

    async def open(self, path: str, *, write: bool = False) -> OpenKv:
        """Open a KV file, and return it once its pages are in memory."""
        file = self.fs.kv_open(ROOT, path, write=write)
        try:
            await self.volume.pager.put_in_memory(file.table)
        except BaseException:
            self.fs.kv_close(file)
            raise
        return file

    async def require(self, path: str, tokens: Sequence[int], *, write: bool = False) -> OpenKv:
        """Open a KV file that has to have these tokens, and the bytes that they make."""
        file = await self.open(path, write=write)
        assert self.tokens(file) == list(tokens)
        assert self.is_right(file)
        return file

    async def sync(self, path: str) -> None:
        await self.keeper.sync(self.fs.find(ROOT, path))

    def tokens(self, file: OpenKv) -> list[int]:
        return file.table.read()[0].tolist()

    def is_right(self, file: OpenKv) -> bool:
        """Whether the bytes of its pages are those that its tokens and positions make."""
        tokens, positions = file.table.read()
        wanted = entry_values(list(zip(tokens.tolist(), positions.tolist(), strict=True)))
        pages = self.fs.pool.store.frames_of(file.table.pages)
        found = self.decoder.moved_entries(pages, file.table.length)
        return [float(each) for each in found[0]] == wanted if wanted else True

    @asynccontextmanager
    async def changing(self, inode: Inode, start: int, stop: int, *, is_cut: bool = False) -> AsyncIterator[None]:
        """Round a change of these bytes of a plain file that was synced: it waits for the mark, as the mount does."""
        content = plain_of(inode)
        content.sums.begin(start, stop)
        try:
            while content.sums.needs_mark(start, stop, is_cut=is_cut):
                content.sums.ask(start, stop, is_cut=is_cut)
                await self.keeper.mark(content)
            yield
        finally:
            content.sums.end()

    def write(self, inode: Inode, data: bytes, offset: int = 0) -> None:
        """Bytes of a plain file: in memory if possible, the rest as a worker does."""
        content, stop = plain_of(inode), offset + len(data)
        assert not content.sums.needs_mark(offset, stop)

        def change() -> None:
            written = content.write_nowait(offset, data)
            if written < len(data):
                content.write_at(offset + written, data[written:])

        self._change(inode, min(offset, content.size), stop, stop, change)

    def cut(self, inode: Inode, size: int) -> None:
        """A plain file gets a size, as by a worker."""
        content = plain_of(inode)
        start, stop = sorted((content.size, size))
        assert not content.sums.needs_mark(start, stop, is_cut=size < content.size)
        self._change(inode, start, stop, size, lambda: content.resize(size))

    def _change(self, inode: Inode, start: int, stop: int, size: int, change: Callable[[], object]) -> None:
        content = plain_of(inode)
        content.sums.begin(start, stop)
        try:
            with self.volume.charged_for(inode, content, size):
                change()
        finally:
            content.sums.end()
        inode.modified()

    def make_plain(self, name: str, data: bytes = b"", parent: Inode | None = None, uid: int = 0) -> Inode:
        inode = self.volume.make_plain(parent or self.tree.root, name.encode(), 0o600, uid, uid)
        if data:
            self.write(inode, data)
        return inode

    def read(self, inode: Inode) -> bytes:
        return plain_of(inode).read_at(0, plain_of(inode).size)

    def kv(self, path: str) -> KvFile:
        content = self.fs.find(ROOT, path).content
        assert isinstance(content, KvFile)
        return content

    async def image(self, content: KvFile) -> bytes:
        """Return the image that cp would copy out."""
        snapshot = self.volume.open_snapshot(content)
        try:
            await trio.to_thread.run_sync(snapshot.prepare)
            lent: dict[int, Bytes] = {}
            while missing := snapshot.missing(0, snapshot.size, lent):
                pool, pages = snapshot.pool, snapshot.held_pages()[missing]
                found = await trio.to_thread.run_sync(look, pool.store, pool.cold, pages, copies)
                lent |= zip(missing, found, strict=True)
            return bytes(snapshot.read(0, snapshot.size, lent))
        finally:
            self.volume.close_snapshot(snapshot)

    def names(self) -> list[str]:
        """Return the path of every name."""
        found, waiting = list[str](), [("", self.tree.root)]
        while waiting:
            path, directory = waiting.pop()
            for name, child in directory.entries.items():
                found.append(f"{path}/{os.fsdecode(name)}")
                waiting += [(found[-1], child)] if child.is_directory else []
        return sorted(found)


@asynccontextmanager
async def running(house: House, *, drain: bool = False) -> AsyncIterator[House]:
    """Run the storage. At the end it is cancelled, after draining if `drain`."""
    async with trio.open_nursery() as nursery:
        await nursery.start(house.keeper.run)
        try:
            yield house
            house.fs.check()
            if drain:
                assert await house.keeper.drain() == []
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await house.keeper.jobs.are_over()
                for inode in house.tree:
                    if isinstance(inode.content, PlainFile):
                        inode.content.close()
                house.volume._let_go_files.clear()
                await trio.to_thread.run_sync(house.volume.removals.wait, 10)
            house.keeper.close()


def is_clean(report: Report) -> bool:
    """No finding of an fsck is damage."""
    return not any(finding.is_damage for finding in report.findings)


@contextmanager
def failing(code: int, match: str | None = None) -> Iterator[None]:
    with pytest.raises(SymError, match=match) as failed:
        yield
    assert failed.value.errno == code


class Hold(threading.Event):
    """Event that lets calls go on which are held up."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Iterator[Hold]:
    """Hold up calls of a worker's function until the event is set, or until the end."""
    real, may_go_on = getattr(owner, name), Hold()

    def call(*given: Any) -> Any:
        may_go_on.reached.set()
        assert may_go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(owner, name, call)
    try:
        yield may_go_on
    finally:
        may_go_on.set()


def _raise(errors: list[SymError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
