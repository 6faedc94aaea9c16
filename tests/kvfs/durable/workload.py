"""A random workload over a house, of everything that changes a tree, with syncs that run beside it.

What it does depends on the seed alone; what is on disk when, on how its threads run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import trio

from kvfs.facts.xattrs import put, remove
from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.domains import QUOTA
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.tree import RENAME_EXCHANGE
from libsym.abi import Advice
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House
from tests.kvfs.durable.model import Model
from tests.kvfs.fakes import commit_all

COUNTS = (1, 2, 5, 31, 32, 33, 64, 70)
NAMES = tuple(b"abcdefgh"[place : place + 1] for place in range(8))
MOST_PAGES = 400
MOST_SYNCS = 6
"""Under way at a time."""


class Workload:
    """Changes a house step by step, and has a model note it."""

    def __init__(self, house: House, model: Model, seed: int) -> None:
        self.house, self.model, self.random = house, model, Random(seed)
        self.num_failed = 0
        """Syncs that did not return 0."""
        self._handles: list[OpenKv] = []
        self._num_syncs = 0
        self._is_quiet = trio.Event()

    async def run(self, num_steps: int) -> None:
        """Take `num_steps` steps. Syncs that are under way after the last step end before the return."""
        steps = self._steps()
        async with trio.open_nursery() as nursery:
            for _ in range(num_steps):
                (step,) = self.random.choices(list(steps), list(steps.values()))
                with suppress(SymError):  # what is not allowed changes nothing
                    await step(nursery)
                self.model.note(self.house)
                if self.random.random() < 0.3:
                    await trio.sleep(self.random.random() * 0.004)  # the disk has time for some of what is under way
        for handle in self._handles:
            self.house.fs.kv_close(handle)
            self.model.note(self.house)

    def _steps(self) -> dict[Callable[[trio.Nursery], Awaitable[None]], int]:
        """Return the steps, each with how often it comes."""
        return {
            self._create: 10,
            self._append: 14,
            self._append_slowly: 4,
            self._truncate: 5,
            self._fork: 8,
            self._make_plain: 4,
            self._write_plain: 6,
            self._cut_plain: 1,
            self._empty: 3,
            self._fork_into: 3,
            self._rename: 12,
            self._exchange: 3,
            self._link: 5,
            self._unlink: 7,
            self._unlink_what_is_written: 2,
            self._mkdir: 4,
            self._rmdir: 3,
            self._symlink: 1,
            self._chmod: 3,
            self._set_attribute: 3,
            self._advise: 2,
            self._make_domain: 2,
            self._sync: 12,
            self._sync_directory: 3,
            self._sync_all: 2,
            self._sync_several: 2,
            self._close: 2,
        }

    # What there is

    def _directory(self) -> Inode:
        directories = sorted((each for each in self.house.tree if each.is_directory and each.nlink), key=_number)
        return self.random.choice(directories)

    def _place(self) -> tuple[Inode, bytes]:
        return self._directory(), self.random.choice(NAMES)

    def _named(self) -> tuple[Inode, bytes]:
        names = [(directory, name) for directory in self.house.tree for name in directory.entries]
        return self._one_of(sorted(names, key=lambda place: (place[0].number, place[1])))

    def _file(self) -> Inode:
        """A KV file that has a name."""
        files = [each for each in self.house.tree if isinstance(each.content, KvFile) and each.names]
        return self._one_of(sorted(files, key=_number))

    def _one_of(self, things: list):
        if not things:
            raise SymError("there is none")
        return self.random.choice(things)

    def _tokens(self) -> list[int]:
        if self.house.fs.pool.num_pages - self.house.fs.pool.num_free > MOST_PAGES:
            raise SymError("it is full")
        return [self.random.randrange(1000) for _ in range(self.random.choice(COUNTS))]

    def _open(self, inode: Inode) -> OpenKv:
        """A handle: sometimes kept, so that the file outlives its names."""
        handle = self.house.fs.kv_open_inode(inode, write=True)
        if self.random.random() < 0.2:
            self._handles.append(handle)
        return handle

    def _let_go(self, handle: OpenKv) -> None:
        if handle not in self._handles:
            self.house.fs.kv_close(handle)

    # Files

    async def _create(self, _nursery: trio.Nursery) -> None:
        directory, name = self._place()
        handle = self.house.fs.kv_create(ROOT, self._path(directory, name))
        self.model.note(self.house)
        if self.random.random() < 0.7:
            self.house.append(handle, self._tokens())
            self.model.note(self.house)
        self.house.fs.kv_close(handle)

    async def _append(self, _nursery: trio.Nursery) -> None:
        if self._handles and self.random.random() < 0.3:
            handle = self.random.choice(self._handles)  # of a file that was renamed or removed since, perhaps
        else:
            handle = self._open(self._file())
        try:
            self.house.append(handle, self._tokens())
            self.model.note(self.house)
        finally:
            self._let_go(handle)

    async def _append_slowly(self, _nursery: trio.Nursery) -> None:
        """The disk may be written to between any two parts of a step."""
        handle = self._open(self._file())
        try:
            tokens, first = self._tokens(), handle.table.next_position
            reservation = self.house.fs.reserve(handle, tokens, range(first, first + len(tokens)))
            await trio.sleep(0.001)
            self.house.decoder.step(reservation)
            await trio.sleep(0.001)
            commit_all(reservation)
            self.house.fs.committed(handle)
            self.model.note(self.house)
        finally:
            self._let_go(handle)

    async def _truncate(self, _nursery: trio.Nursery) -> None:
        inode = self._file()
        handle = self._open(inode)
        try:
            self.house.fs.kv_truncate(handle, self.random.randint(0, handle.table.length))
            self.model.note(self.house)
        finally:
            self._let_go(handle)

    async def _fork(self, _nursery: trio.Nursery) -> None:
        source = self._open(self._file())
        try:
            directory, name = self._place()
            path = self._path(directory, name)
            fork = self.house.fs.kv_fork(ROOT, source, path)
            self.model.note(self.house)
            if self.random.random() < 0.6:
                self.house.append(fork, self._tokens())
                self.model.note(self.house)
            self.house.fs.kv_close(fork)
        finally:
            self._let_go(source)

    def _path(self, directory: Inode, name: bytes) -> str:
        return f"{str(self.house.tree.path_of(directory)).rstrip('/')}/{name.decode()}".lstrip("/")

    async def _close(self, _nursery: trio.Nursery) -> None:
        if self._handles:
            self.house.fs.kv_close(self._handles.pop(0))

    # Plain files

    async def _make_plain(self, _nursery: trio.Nursery) -> None:
        directory, name = self._place()
        inode = self.house.volume.make_plain(directory, name, 0o600, 0, 0)
        self.model.note(self.house)
        if self.random.random() < 0.5:
            self.house.write(inode, self._bytes())

    async def _write_plain(self, _nursery: trio.Nursery) -> None:
        inode, data = self._plain(), self._bytes()
        size = self.house.volume.size_of(inode)
        start = self.random.choice((size, self.random.randint(0, size)))
        content = inode.content
        async with self.house.changing(inode, start, start + len(data)):
            if inode.content is content:  # else it was emptied meanwhile
                self.house.write(inode, data, start)
                self.model.note(self.house)

    async def _cut_plain(self, _nursery: trio.Nursery) -> None:
        inode = self._plain()
        before, content = self.house.volume.size_of(inode), inode.content
        size = self.random.randint(0, before)
        async with self.house.changing(inode, size, before, is_cut=size < before):
            if inode.content is content:
                self.house.cut(inode, size)
                self.model.note(self.house)

    async def _sum_plain(self, _nursery: trio.Nursery) -> None:
        """Sum a plain file, as if it had been quiet for long."""
        content = self._plain().content
        assert isinstance(content, PlainFile)
        if not content.is_dirty and not content.sums.is_changing:
            await self.house.keeper.summer.sum(content)

    async def _empty(self, _nursery: trio.Nursery) -> None:
        """Empty any file, as O_TRUNC does."""
        directory, name = self._named()
        self.house.volume.truncate(directory.entries[name], 0)

    async def _fork_into(self, _nursery: trio.Nursery) -> None:
        """Fork a file into a new one, as cp does."""
        origin = self._file()
        source = origin.content
        directory, name = self._place()
        inode = self.house.volume.make_plain(directory, name, 0o600, 0, 0)
        self.model.note(self.house)
        if self.random.random() < 0.5:
            await trio.sleep(0.002)
        if isinstance(source, KvFile) and source.users:
            snapshot = self.house.volume.open_snapshot(source)
            self.house.volume.fork_into(snapshot, origin, source, inode)
            self.house.volume.close_snapshot(snapshot)

    def _plain(self) -> Inode:
        files = [each for each in self.house.tree if isinstance(each.content, PlainFile) and each.names]
        return self._one_of(sorted(files, key=_number))

    def _bytes(self) -> bytes:
        return self.random.randbytes(self.random.choice((1, 100, 5000)))

    # Names

    async def _rename(self, _nursery: trio.Nursery) -> None:
        self.house.tree.rename(*self._named(), *self._place())

    async def _exchange(self, _nursery: trio.Nursery) -> None:
        self.house.tree.rename(*self._named(), *self._named(), RENAME_EXCHANGE)

    async def _link(self, _nursery: trio.Nursery) -> None:
        self.house.tree.link(self._file(), *self._place())

    async def _unlink(self, _nursery: trio.Nursery) -> None:
        self.house.tree.unlink(*self._named())

    async def _unlink_what_is_written(self, nursery: trio.Nursery) -> None:
        inode = self._file()
        await self._append(nursery)
        self._start_sync(nursery, inode)
        await trio.lowlevel.checkpoint()
        for number, name in sorted(inode.names):
            self.house.tree.unlink(self.house.tree.get(number), name)
            self.model.note(self.house)

    async def _mkdir(self, _nursery: trio.Nursery) -> None:
        self.house.tree.make(*self._place(), 0o040000, mode=0o755, uid=0, gid=0)

    async def _rmdir(self, _nursery: trio.Nursery) -> None:
        directory, name = self._named()
        inode = directory.entries[name]
        if inode.is_directory and self.random.random() < 0.7:
            for child in sorted(inode.entries):
                if not inode.entries[child].is_directory:
                    self.house.tree.unlink(inode, child)
                    self.model.note(self.house)
        self.house.tree.rmdir(directory, name)

    async def _symlink(self, _nursery: trio.Nursery) -> None:
        inode = self.house.tree.make(*self._place(), 0o120000, mode=0o777, uid=0, gid=0)
        inode.target = b"somewhere/%d" % inode.number
        inode.charge(len(inode.target))

    # Attributes

    async def _chmod(self, _nursery: trio.Nursery) -> None:
        directory, name = self._named()
        inode = directory.entries[name]
        inode.mode = self.random.choice((0o600, 0o640, 0o755, 0o2755))
        inode.changed()

    async def _set_attribute(self, _nursery: trio.Nursery) -> None:
        directory, name = self._named()
        value = b"%d" % self.random.randrange(1000)
        put(self.house.volume, directory.entries[name], b"user.note", value, 0)

    async def _advise(self, _nursery: trio.Nursery) -> None:
        inode = self._file()
        handle = self._open(inode)
        try:
            what = self.random.choice(((Advice.PIN, 0), (Advice.UNPIN, 0), (Advice.TTL, 10**9), (Advice.PRIORITY, 7)))
            self.house.fs.kv_advise_open(ROOT, handle, [what])
            self.model.note(self.house)
        finally:
            self._let_go(handle)

    async def _make_domain(self, _nursery: trio.Nursery) -> None:
        """Make a directory a domain, after its names are removed; a domain becomes a plain directory."""
        inode = self._directory()
        if inode.domain is not None:
            remove(self.house.volume, inode, QUOTA, 0)
            return
        if not inode.num_subdirectories and inode is not self.house.tree.root:
            for name in sorted(inode.entries):
                self.house.tree.unlink(inode, name)
                self.model.note(self.house)
        put(self.house.volume, inode, QUOTA, b"64M", 0)

    # Syncs

    async def _sync(self, nursery: trio.Nursery) -> None:
        directory, name = self._named()
        self._start_sync(nursery, directory.entries[name])

    async def _sync_directory(self, nursery: trio.Nursery) -> None:
        self._start_sync(nursery, self._directory())

    async def _sync_all(self, nursery: trio.Nursery) -> None:
        self._start_sync(nursery, None)

    async def _sync_several(self, nursery: trio.Nursery) -> None:
        for _ in range(3):
            self._start_sync(nursery, self._file())

    def _start_sync(self, nursery: trio.Nursery, inode: Inode | None) -> None:
        if self._num_syncs < MOST_SYNCS:
            self._num_syncs += 1
            nursery.start_soon(self._sync_one, inode)

    async def _sync_one(self, inode: Inode | None) -> None:
        keeper = self.house.keeper
        try:
            with self.model.syncing(None if inode is None else inode.number):
                await (keeper.sync_all() if inode is None else keeper.sync(inode))
        except SymError:
            self.num_failed += 1
        finally:
            self._num_syncs -= 1


class PlainWorkload(Workload):
    """Plain files alone: most of what it does overwrites bytes that were synced."""

    def _steps(self) -> dict[Callable[[trio.Nursery], Awaitable[None]], int]:
        return {
            self._make_plain: 4,
            self._write_plain: 16,
            self._cut_plain: 4,
            self._sum_plain: 4,
            self._empty: 1,
            self._rename: 2,
            self._unlink: 1,
            self._sync: 12,
            self._sync_all: 1,
        }


def _number(inode: Inode) -> int:
    return inode.number
