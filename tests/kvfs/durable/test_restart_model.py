"""Random programs over a house that is synced in part, crashes and starts again: the model says what may come back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.durable.journal import OPERATIONS_A_CUT, OPERATIONS_A_SLICE
from kvfs.facts.xattrs import put
from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.tree import RENAME_EXCHANGE
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House
from tests.kvfs.durable.model import Model

NUM_PAGES = 256
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
COUNTS = st.sampled_from([1, 2, 31, 32, 33, 65])
SHARES = st.floats(0, 1)
ONES = st.integers(0, 1000)
"""Number that picks one of the existing files or handles."""


class Restarts(RuleBasedStateMachine):
    """The storage works only while something waits for it, so that the same steps do the same."""

    def __init__(self, a_cut: int = OPERATIONS_A_CUT, a_slice: int = OPERATIONS_A_SLICE) -> None:
        super().__init__()
        self.a_cut = a_cut, a_slice
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="restarts-", dir=memory if memory.is_dir() else None))
        self.token = 0
        self.house = House(self.directory, num_pages=NUM_PAGES, a_cut=self.a_cut)
        self.wait_for(lambda: self.house.keeper.sync(self.house.tree.root))
        self.begin()

    def begin(self) -> None:
        self.model = Model(self.house)
        self.handles: list[OpenKv] = []

    def wait_for(self, work: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.house.keeper.run)
                await work()
                while self.house.keeper.jobs.num_under_way:
                    await self.house.keeper.jobs.idle()
                nursery.cancel_scope.cancel()

        trio.run(main)

    def teardown(self) -> None:
        try:
            self.restart()
        finally:
            self.house.keeper.close()
            shutil.rmtree(self.directory)

    @invariant()
    def balances(self) -> None:
        self.house.fs.check()

    # What there is

    def all_of(self, kind: Callable[[Inode], bool]) -> list[Inode]:
        return sorted((each for each in self.house.tree if kind(each)), key=lambda inode: inode.number)

    def kv_files(self) -> list[Inode]:
        return self.all_of(lambda inode: isinstance(inode.content, KvFile) and bool(inode.names))

    def plain_files(self) -> list[Inode]:
        return self.all_of(lambda inode: isinstance(inode.content, PlainFile) and bool(inode.names))

    def directory_of(self, one: int) -> Inode:
        directories = self.all_of(lambda inode: inode.is_directory and bool(inode.nlink))
        return directories[one % len(directories)]

    def named(self, one: int) -> tuple[Inode, bytes]:
        names = [(directory, name) for directory in self.house.tree for name in sorted(directory.entries)]
        return names[one % len(names)]

    def sizes(self) -> dict[tuple[int, bytes], int]:
        tree, size_of = self.house.tree, self.house.volume.size_of
        return {(each.number, name): size_of(inode) for each in tree for name, inode in each.entries.items()}

    def tokens(self, count: int) -> list[int]:
        self.token += count
        return [token % 1000 for token in range(self.token - count, self.token)]

    def has_room(self) -> bool:
        return self.house.fs.pool.num_free > NUM_PAGES // 4

    def note(self, operation: Callable[[], object]) -> None:
        """Do it, if it may be done."""
        with suppress(SymError):
            operation()
        self.model.note(self.house)

    def path(self, directory: Inode, name: bytes) -> str:
        return f"{str(self.house.tree.path_of(directory)).rstrip('/')}/{name.decode()}".lstrip("/")

    def handle_on(self, one: int) -> OpenKv:
        """Return a handle that was kept, or a new one whose pages are in memory."""
        files = self.kv_files()
        if one % 4 == 0 and self.handles:
            return self.handles[one % len(self.handles)]
        handle = self.house.fs.kv_open_inode(files[one % len(files)], write=True)
        self.handles.append(handle)
        self.wait_for(lambda: self.house.volume.pager.put_in_memory(handle.table))
        return handle

    # KV files

    @rule(one=ONES, name=NAMES, count=COUNTS)
    def create(self, one: int, name: bytes, count: int) -> None:
        self.note(lambda: self.handles.append(self.house.fs.kv_create(ROOT, self.path(self.directory_of(one), name))))
        if self.handles and self.has_room():
            self.note(lambda: self.house.append(self.handles[-1], self.tokens(count)))

    @precondition(lambda self: self.kv_files() and self.has_room())
    @rule(one=ONES, count=COUNTS)
    def append(self, one: int, count: int) -> None:
        handle = self.handle_on(one)
        self.note(lambda: self.house.append(handle, self.tokens(count)))

    @precondition(lambda self: self.kv_files())
    @rule(one=ONES, share=SHARES)
    def truncate(self, one: int, share: float) -> None:
        handle = self.handle_on(one)
        self.note(lambda: self.house.fs.kv_truncate(handle, int(share * handle.table.length)))

    @precondition(lambda self: self.kv_files())
    @rule(one=ONES, other=ONES, name=NAMES)
    def fork(self, one: int, other: int, name: bytes) -> None:
        source = self.handle_on(one)
        path = self.path(self.directory_of(other), name)
        self.note(lambda: self.handles.append(self.house.fs.kv_fork(ROOT, source, path)))

    @precondition(lambda self: self.handles)
    @rule(one=ONES)
    def close(self, one: int) -> None:
        handle = self.handles.pop(one % len(self.handles))
        self.note(lambda: self.house.fs.kv_close(handle))

    # Plain files

    @rule(one=ONES, name=NAMES)
    def make_plain(self, one: int, name: bytes) -> None:
        self.note(lambda: self.house.volume.make_plain(self.directory_of(one), name, 0o600, 0, 0))

    def mark(self, inode: Inode, start: int, stop: int, *, is_cut: bool = False) -> None:
        assert isinstance(inode.content, PlainFile)
        if inode.content.sums.needs_mark(start, stop, is_cut=is_cut):
            self.wait_for(lambda: self.house.marked(inode, start, stop, is_cut=is_cut))

    @precondition(lambda self: self.plain_files())
    @rule(one=ONES, share=SHARES, count=COUNTS)
    def write_plain(self, one: int, share: float, count: int) -> None:
        files = self.plain_files()
        inode = files[one % len(files)]
        offset = int(share * self.house.volume.size_of(inode))
        self.mark(inode, offset, offset + count)
        self.note(lambda: self.house.write(inode, bytes(token % 256 for token in self.tokens(count)), offset))

    @precondition(lambda self: self.plain_files())
    @rule(one=ONES, share=SHARES)
    def cut_plain(self, one: int, share: float) -> None:
        files = self.plain_files()
        inode = files[one % len(files)]
        before = self.house.volume.size_of(inode)
        size = int(share * before)
        self.mark(inode, size, before, is_cut=size < before)
        self.note(lambda: self.house.cut(inode, size))

    @precondition(lambda self: self.kv_files() or self.plain_files())
    @rule(one=ONES)
    def empty(self, one: int) -> None:
        files = [*self.kv_files(), *self.plain_files()]
        self.note(lambda: self.house.volume.truncate(files[one % len(files)], 0))

    # Names

    @rule(one=ONES, name=NAMES)
    def make_directory(self, one: int, name: bytes) -> None:
        self.note(lambda: self.house.tree.make(self.directory_of(one), name, 0o040000, mode=0o755, uid=0, gid=0))

    @precondition(lambda self: self.house.tree.num_names)
    @rule(one=ONES, other=ONES, name=NAMES)
    def rename(self, one: int, other: int, name: bytes) -> None:
        self.note(lambda: self.house.tree.rename(*self.named(one), self.directory_of(other), name))

    @precondition(lambda self: self.house.tree.num_names)
    @rule(one=ONES, other=ONES)
    def exchange(self, one: int, other: int) -> None:
        self.note(lambda: self.house.tree.rename(*self.named(one), *self.named(other), RENAME_EXCHANGE))

    @precondition(lambda self: self.kv_files())
    @rule(one=ONES, other=ONES, name=NAMES)
    def link(self, one: int, other: int, name: bytes) -> None:
        files = self.kv_files()
        self.note(lambda: self.house.tree.link(files[one % len(files)], self.directory_of(other), name))

    @precondition(lambda self: self.house.tree.num_names)
    @rule(one=ONES)
    def remove(self, one: int) -> None:
        directory, name = self.named(one)
        tree = self.house.tree
        self.note(lambda: (tree.rmdir if directory.entries[name].is_directory else tree.unlink)(directory, name))

    # Attributes

    @precondition(lambda self: self.house.tree.num_names)
    @rule(one=ONES, value=ONES)
    def set_attribute(self, one: int, value: int) -> None:
        directory, name = self.named(one)
        inode = directory.entries[name]
        self.note(lambda: put(self.house.volume, inode, b"user.note", b"%d" % value, 0))

    # The disk

    @precondition(lambda self: self.house.tree.num_names)
    @rule(one=ONES)
    def sync(self, one: int) -> None:
        directory, name = self.named(one)
        self.sync_inode(directory.entries[name])

    @rule(one=ONES)
    def sync_directory(self, one: int) -> None:
        self.sync_inode(self.directory_of(one))

    def sync_inode(self, inode: Inode) -> None:
        async def work() -> None:
            with self.model.syncing(inode.number):
                await self.house.keeper.sync(inode)

        self.wait_for(work)

    @rule()
    def sync_all(self) -> None:
        async def work() -> None:
            with self.model.syncing():
                await self.house.keeper.sync_all()

        self.wait_for(work)

    @precondition(lambda self: self.kv_files())
    @rule(one=ONES)
    def write_pages(self, one: int) -> None:
        """Entries are on their way, and nobody has asked for a commit yet."""
        files = self.kv_files()
        content = files[one % len(files)].content
        self.wait_for(lambda: self.house.keeper.pages_out.write(content, content.table.length))

    @rule(others=st.integers(0, 3))
    def commit(self, others: int) -> None:
        """Commit all changes that can be, and of some other inodes the part that is on disk."""
        self.wait_for(lambda: self.house.keeper._commit(lambda: 0, others=others))

    @rule()
    def crash(self) -> None:
        self.house.keeper.close()
        self.house = House(self.directory, num_pages=NUM_PAGES, a_cut=self.a_cut)
        self.wait_for(lambda: self.model.judge(self.house))
        self.begin()

    @rule()
    def restart(self) -> None:
        """An orderly end loses nothing."""
        self.sync_all()
        before = self.sizes()
        self.crash()
        assert self.sizes() == before


class SlicedRestarts(Restarts):
    """Cuts take few operations at a time, so that nearly every sync depends on more."""

    def __init__(self) -> None:
        super().__init__(2, 3)


class TestRestarts(Restarts.TestCase):
    settings = settings(max_examples=20, stateful_step_count=40, deadline=None, database=None, derandomize=True)


class TestSlicedRestarts(SlicedRestarts.TestCase):
    settings = settings(max_examples=20, stateful_step_count=40, deadline=None, database=None, derandomize=True)


@pytest.mark.slow
class TestManySlicedRestarts(SlicedRestarts.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None, database=None, derandomize=True)


@pytest.mark.slow
class TestManyRestarts(Restarts.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None, database=None, derandomize=True)
