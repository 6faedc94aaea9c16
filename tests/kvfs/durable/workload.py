"""Random work on a house, of everything that changes a tree, with syncs that run beside it.

A workload's steps depend on its source of chance alone: a seed, or a search for a failure in few steps.
"""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import trio

from kvfs.facts import xattrs
from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.domains import QUOTA
from kvfs.names.inode import MOST_IN_MEMORY, Inode
from kvfs.names.plain import PlainFile
from kvfs.names.tree import RENAME_EXCHANGE
from libsym.abi import Advice
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, plain_of
from tests.kvfs.durable.model import Model
from tests.kvfs.fakes import commit_all

T = TypeVar("T")

COUNTS = (1, 2, 5, 31, 32, 33, 64, 70)
SIZES = (0, 1, 500, MOST_IN_MEMORY, 20_000)
"""Sizes of attributes: the large ones are in the index alone once they are kept."""
UIDS = (0, 0, 1000, 1001)
NAMES = tuple(b"abcdefgh"[place : place + 1] for place in range(8))
MOST_SYNCS = 6
"""Under way at a time."""
STEPS = {
    "create": 10, "append": 14, "append_slowly": 4, "truncate": 5, "fork": 8, "close": 2,
    "make_plain": 4, "write_plain": 6, "cut_plain": 1, "empty": 3, "fork_into": 3,
    "rename": 12, "exchange": 3, "link": 5, "unlink": 7, "unlink_what_is_written": 2, "mkdir": 4, "rmdir": 3,
    "symlink": 1, "chmod": 3, "chown": 2, "set_attribute": 4, "advise": 2, "make_domain": 2,
    "sync": 12, "sync_directory": 3, "sync_all": 2, "sync_several": 2,
}  # fmt: skip
"""Steps, and how often each comes."""
STEPS_ON_PLAIN = {
    "make_plain": 4, "write_plain": 16, "cut_plain": 4, "sum_plain": 4, "empty": 1, "rename": 2, "unlink": 1,
    "sync": 12, "sync_all": 1,
}  # fmt: skip
"""Steps on plain files alone: most overwrite bytes that were synced."""


class Workload:
    """Changes a house step by step, and has a model note it."""

    def __init__(self, house: House, model: Model, random: Random, steps: dict[str, int] = STEPS) -> None:
        self.house, self.model, self.random = house, model, random
        self.fs, self.tree, self.volume = house.fs, house.tree, house.volume
        self.num_failed = 0
        """Syncs that did not return 0."""
        self.handles: list[OpenKv] = []
        self._steps = steps
        self._num_syncs = 0

    async def run(self, num_steps: int) -> None:
        """Take `num_steps` steps. Syncs that are under way after the last step end before the return."""
        async with trio.open_nursery() as nursery:
            for _ in range(num_steps):
                (name,) = self.random.choices(list(self._steps), list(self._steps.values()))
                await self.step(name, nursery)
                if self.random.random() < 0.3:
                    await trio.sleep(self.random.random() * 0.004)  # the disk has time for some of what is under way
        while self.handles:
            await self._close(nursery)
            self._note()

    async def step(self, name: str, nursery: trio.Nursery) -> None:
        with suppress(SymError):  # what is not allowed changes nothing
            await getattr(self, f"_{name}")(nursery)
        self._note()

    def _note(self) -> None:
        self.model.note(self.house)

    # What there is

    def _one_of(self, things: list[T]) -> T:
        if not things:
            raise SymError("there is none")
        return self.random.choice(things)

    def _inode(self, is_one: Callable[[Inode], object]) -> Inode:
        return self._one_of(sorted((each for each in self.tree if is_one(each)), key=lambda inode: inode.number))

    def _directory(self) -> Inode:
        return self._inode(lambda each: each.is_directory and each.nlink)

    def _file(self) -> Inode:
        return self._inode(lambda each: isinstance(each.content, KvFile) and each.names)

    def _plain(self) -> Inode:
        return self._inode(lambda each: isinstance(each.content, PlainFile) and each.names)

    def _place(self) -> tuple[Inode, bytes]:
        return self._directory(), self.random.choice(NAMES)

    def _path(self) -> str:
        directory, name = self._place()
        return f"{str(self.tree.path_of(directory)).rstrip('/')}/{name.decode()}".lstrip("/")

    def _name(self) -> tuple[Inode, bytes]:
        names = [(directory, name) for directory in self.tree for name in directory.entries]
        return self._one_of(sorted(names, key=lambda place: (place[0].number, place[1])))

    def _named(self) -> Inode:
        directory, name = self._name()
        return directory.entries[name]

    def _tokens(self) -> list[int]:
        if self.fs.pool.num_free < self.fs.pool.num_pages // 4:
            raise SymError("it is full")
        return [self.random.randrange(1000) for _ in range(self.random.choice(COUNTS))]

    def _bytes(self) -> bytes:
        return self.random.randbytes(self.random.choice((1, 100, 5000)))

    def _open(self, inode: Inode) -> OpenKv:
        """A handle: sometimes kept, so that the file outlives its names."""
        handle = self.fs.kv_open_inode(inode, write=True)
        if self.random.random() < 0.2:
            self.handles.append(handle)
        return handle

    def _let_go(self, handle: OpenKv) -> None:
        self._note()
        if handle not in self.handles:
            self.fs.kv_close(handle)

    # KV files

    async def _create(self, _nursery: trio.Nursery) -> None:
        handle = self.fs.kv_create(ROOT, self._path())
        self._note()
        if self.random.random() < 0.7:
            self.house.append(handle, self._tokens())
        self._let_go(handle)

    async def _append(self, _nursery: trio.Nursery) -> None:
        if self.handles and self.random.random() < 0.3:
            handle = self.random.choice(self.handles)  # of a file that was renamed or removed since, perhaps
        else:
            handle = self._open(self._file())
        try:
            self.house.append(handle, self._tokens())
        finally:
            self._let_go(handle)

    async def _append_slowly(self, _nursery: trio.Nursery) -> None:
        """The disk may be written to between any two parts of a step."""
        handle = self._open(self._file())
        try:
            reservation = self.house.reserve(handle, self._tokens())
            await trio.sleep(0.001)
            self.house.decoder.step(reservation)
            await trio.sleep(0.001)
            commit_all(reservation)
            self.fs.committed(handle)
        finally:
            self._let_go(handle)

    async def _truncate(self, _nursery: trio.Nursery) -> None:
        handle = self._open(self._file())
        try:
            self.fs.kv_truncate(handle, self.random.randint(0, handle.table.length))
        finally:
            self._let_go(handle)

    async def _fork(self, _nursery: trio.Nursery) -> None:
        source = self._open(self._file())
        try:
            fork = self.fs.kv_fork(ROOT, source, self._path())
            self._note()
            if self.random.random() < 0.6:
                self.house.append(fork, self._tokens())
            self._let_go(fork)
        finally:
            self._let_go(source)

    async def _close(self, _nursery: trio.Nursery) -> None:
        if self.handles:
            self.fs.kv_close(self.handles.pop(0))

    # Plain files

    async def _make_plain(self, _nursery: trio.Nursery) -> None:
        uid = self.random.choice(UIDS)
        inode = self.volume.make_plain(*self._place(), 0o600, uid, uid)
        self._note()
        if self.random.random() < 0.5:
            self.house.write(inode, self._bytes())

    async def _write_plain(self, _nursery: trio.Nursery) -> None:
        inode, data = self._plain(), self._bytes()
        size, content = self.volume.size_of(inode), inode.content
        start = self.random.choice((size, self.random.randint(0, size)))
        async with self.house.changing(inode, start, start + len(data)):
            if inode.content is content:  # else it was emptied meanwhile
                self.house.write(inode, data, start)
                self._note()

    async def _cut_plain(self, _nursery: trio.Nursery) -> None:
        inode = self._plain()
        before, content = self.volume.size_of(inode), inode.content
        size = self.random.randint(0, before)
        async with self.house.changing(inode, size, before, is_cut=size < before):
            if inode.content is content:
                self.house.cut(inode, size)
                self._note()

    async def _sum_plain(self, _nursery: trio.Nursery) -> None:
        """Sum a plain file, as if it had been quiet for long."""
        content = plain_of(self._plain())
        if not content.is_dirty and not content.sums.is_changing:
            await self.house.keeper.summer.sum(content)

    async def _empty(self, _nursery: trio.Nursery) -> None:
        """Empty any file, as O_TRUNC does."""
        self.volume.truncate(self._named(), 0)

    async def _fork_into(self, _nursery: trio.Nursery) -> None:
        """Fork a file into a new one, as cp does."""
        origin = self._file()
        source = origin.content
        inode = self.volume.make_plain(*self._place(), 0o600, 0, 0)
        self._note()
        if self.random.random() < 0.5:
            await trio.sleep(0.002)
        if isinstance(source, KvFile) and source.users:
            snapshot = self.volume.open_snapshot(source)
            self.volume.fork_into(snapshot, origin, source, inode)
            self.volume.close_snapshot(snapshot)

    # Names

    async def _rename(self, _nursery: trio.Nursery) -> None:
        self.tree.rename(*self._name(), *self._place())

    async def _exchange(self, _nursery: trio.Nursery) -> None:
        self.tree.rename(*self._name(), *self._name(), RENAME_EXCHANGE)

    async def _link(self, _nursery: trio.Nursery) -> None:
        self.tree.link(self._file(), *self._place())

    async def _unlink(self, _nursery: trio.Nursery) -> None:
        self.tree.unlink(*self._name())

    async def _unlink_what_is_written(self, nursery: trio.Nursery) -> None:
        inode = self._file()
        await self._append(nursery)
        self._start_sync(nursery, inode)
        await trio.lowlevel.checkpoint()
        for number, name in sorted(inode.names):
            self.tree.unlink(self.tree.get(number), name)
            self._note()

    def _unlink_all(self, directory: Inode) -> None:
        for name in sorted(directory.entries):
            if not directory.entries[name].is_directory:
                self.tree.unlink(directory, name)
                self._note()

    async def _mkdir(self, _nursery: trio.Nursery) -> None:
        self.tree.make(*self._place(), 0o040000, mode=0o755, uid=self.random.choice(UIDS), gid=0)

    async def _rmdir(self, _nursery: trio.Nursery) -> None:
        directory, name = self._name()
        if self.random.random() < 0.7:
            self._unlink_all(directory.entries[name])
        self.tree.rmdir(directory, name)

    async def _symlink(self, _nursery: trio.Nursery) -> None:
        target = b"somewhere/" * self.random.randrange(1, 400)
        self.tree.make(*self._place(), 0o120000, mode=0o777, uid=self.random.choice(UIDS), gid=0, target=target)

    # Attributes

    async def _chmod(self, _nursery: trio.Nursery) -> None:
        inode = self._named()
        inode.mode = self.random.choice((0o600, 0o640, 0o755, 0o2755))
        inode.changed()

    async def _chown(self, _nursery: trio.Nursery) -> None:
        self.volume.change_owner(self._named(), self.random.choice(UIDS))

    async def _set_attribute(self, _nursery: trio.Nursery) -> None:
        inode, size = self._named(), self.random.choice(SIZES)
        name, value = b"user.%d" % self.random.randrange(3), b"%d" % self.random.randrange(1000) * size
        await self.house.keeper.bring_xattrs(inode)
        assert self.model.has_xattrs(inode), "they are as they were before the index alone had them"
        if inode.xattrs and self.random.random() < 0.3:
            xattrs.remove(self.volume, inode, min(inode.xattrs), 0)
        else:
            xattrs.put(self.volume, inode, name, value[:size], 0)

    async def _advise(self, _nursery: trio.Nursery) -> None:
        handle = self._open(self._file())
        try:
            what = self.random.choice(((Advice.PIN, 0), (Advice.UNPIN, 0), (Advice.TTL, 10**9), (Advice.PRIORITY, 7)))
            self.fs.kv_advise_open(ROOT, handle, [what])
        finally:
            self._let_go(handle)

    async def _make_domain(self, _nursery: trio.Nursery) -> None:
        """Make a directory a domain, after its names are removed; a domain becomes a plain directory."""
        inode = self._directory()
        if inode.domain is not None:
            xattrs.remove(self.volume, inode, QUOTA, 0)
            return
        if not inode.num_subdirectories and inode is not self.tree.root:
            self._unlink_all(inode)
        xattrs.put(self.volume, inode, QUOTA, b"64M", 0)
        self._note()
        await self.house.keeper.bring_xattrs(inode)
        self.volume.domains.set_weight(inode, b"2", 0)

    # Syncs

    async def _sync(self, nursery: trio.Nursery) -> None:
        self._start_sync(nursery, self._named())

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
