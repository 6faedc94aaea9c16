"""Requests for plain files on a disk that hangs or fails, without a mount, by a clock that the test turns."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
import trio.testing

from kvfs.fs import FileSystem
from kvfs.mount.buffers import BUFFER_BYTES
from kvfs.mount.disk_work import INTERRUPT_GRACE_S, MAX_THREADS_OF_A_FILE
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import Handle, OpenFiles
from kvfs.names.content import KvFile
from kvfs.names.inode import Credentials, Inode
from kvfs.names.plain import PlainFile
from kvfs.pages.pool import PagePool
from libsym.errors import SymError
from tests.kvfs.disks import TroubledDisk
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore

UID = 1000
DEADLINE_S = 30.0


class Bench:
    """Open files over a troubled disk."""

    def __init__(self, backing: Path, clock: trio.testing.MockClock) -> None:
        facts = FakeFacts()
        self.store = FakeStore(facts, num_pages=64)
        self.trouble = TroubledDisk(DEADLINE_S, threading.current_thread())
        self.fs = FileSystem(PagePool(self.store), facts, backing, 0, 0, self.trouble.disk)
        self.volume = self.fs.volume
        self.files = OpenFiles(self.volume, Eager(), Nodes(self.volume.tree))
        self.clock = clock

    def make(self, name: str) -> Inode:
        return self.volume.make_plain(self.volume.tree.root, name.encode(), 0o600, UID, UID)

    async def open(self, inode: Inode, *, truncate: bool = False) -> Handle:
        return await self.files.open(inode, inode.number, readable=True, writable=True, truncate=truncate)

    async def new(self, name: str, data: bytes = b"") -> Handle:
        handle = await self.open(self.make(name))
        if data:
            await self.files.write(handle, 0, data)
        return handle

    async def has(self, handle: Handle) -> bytes:
        return bytes(await self.files.read(handle, 0, 1 << 21))

    def image(self, num_entries: int) -> bytes:
        handle = self.fs.kv_create(Credentials(0, 0), None)
        FakeDecoder(self.store).append(handle.table, range(num_entries))
        self.fs.committed(handle)
        snapshot = self.volume.open_snapshot(handle.content)
        image = bytes(snapshot.read(0, snapshot.size))
        self.volume.close_snapshot(snapshot)
        self.fs.kv_close(handle)
        return image

    @property
    def charged(self) -> int:
        return self.fs.pool.accounts.of(UID).other_bytes

    def hang(self, *calls: str, whose: Handle | None = None) -> None:
        self.trouble.stall(*calls, whose="" if whose is None else f"{whose.file.inode.number}.")

    async def hung(self) -> None:
        """A call has begun to hang."""
        await trio.to_thread.run_sync(self.trouble.entered.acquire)

    async def answer(self) -> None:
        """The disk goes on, and all that was left behind has come back."""
        self.trouble.go_on()
        disk = self.files._disk
        while disk._changes or disk._at_work:
            await trio.lowlevel.checkpoint()

    def turn(self, seconds: float = DEADLINE_S) -> None:
        self.clock.jump(seconds)


Test: TypeAlias = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Test], None]:
    """Runs a test; its books are right in the end."""

    def run(test: Test) -> None:
        clock = trio.testing.MockClock()

        async def main() -> None:
            bench = Bench(tmp_path / "backing", clock)
            try:
                await test(bench)
                await bench.answer()
            finally:
                bench.trouble.go_on()
            bench.files.release_all()
            bench.fs.check()
            bench.fs.close()
            assert not list((tmp_path / "backing").iterdir())

        trio.run(main, clock=clock)

    return run


class Outcome:
    """Outcome of a request that was started in the background."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: SymError | None = None

    async def run(self, call: Callable[[], Awaitable[object]]) -> None:
        try:
            with self.scope:
                await call()
        except SymError as error:
            self.error = error
        finally:
            self.done.set()


@contextmanager
def times_out() -> Iterator[None]:
    with pytest.raises(SymError, match=r"the disk under .*backing does not answer") as caught:
        yield
    assert caught.value.errno == errno.ETIMEDOUT


def start(nursery: trio.Nursery, call: Callable[[], Awaitable[object]]) -> Outcome:
    outcome = Outcome()
    nursery.start_soon(outcome.run, call)
    return outcome


def has_timed_out(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_write_that_the_disk_does_not_answer_is_given_up_and_may_still_be_done(
    run: Callable[[Test], None], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: Bench) -> None:
        handle, other = await bench.new("a", b"old"), await bench.new("b", b"other")
        inode = handle.file.inode
        bench.hang("pwritev", whose=handle)
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, 3, bytes(size)))
            await bench.hung()
            bench.turn(DEADLINE_S - 1)
            await bench.files.write(other, 5, b"s")
            assert await bench.has(other) == b"others", "meanwhile"
            assert not write.done.is_set()
            bench.turn(1)
        assert has_timed_out(write)
        assert "was given up after 30 s" in caplog.text
        caplog.clear()
        assert not handle.file.lock.held
        assert bench.files.shown(inode, inode.number)[0] == 3
        assert await bench.has(handle) == b"old"
        assert bench.charged == 3 + size + 6
        bench.fs.check()
        inode.mtime_ns = 0
        await bench.answer()
        assert await bench.has(handle) == b"old" + bytes(size)
        assert bench.charged == 3 + size + 6
        assert inode.mtime_ns > 0, "the kernel is to drop what it has of it"
        await bench.files.write(handle, 0, b"new")
        assert (await bench.has(handle))[:4] == b"new\0"

    run(test)


def test_what_comes_later_is_never_overwritten_by_what_was_given_up(run: Callable[[Test], None]) -> None:
    """A request's deadline begins when the request comes. A write that times out before it began is not done."""

    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"old")
        bench.hang("pwritev")
        async with trio.open_nursery() as nursery:
            first = start(nursery, lambda: bench.files.write(handle, 0, b"1st"))
            await bench.hung()
            bench.turn(10)
            second = start(nursery, lambda: bench.files.write(handle, 0, b"2nd"))
            await trio.testing.wait_all_tasks_blocked()
            bench.turn(10)
            third = start(nursery, lambda: bench.files.write(handle, 0, b"3rd"))
            await trio.testing.wait_all_tasks_blocked()
            bench.turn(10)
            await first.done.wait()
            assert not second.done.is_set()
            bench.turn(10)
            await second.done.wait()
            assert not third.done.is_set()
            bench.trouble.go_on()
        assert has_timed_out(first)
        assert has_timed_out(second)
        assert third.error is None
        assert await bench.has(handle) == b"3rd"
        assert bench.trouble.calls.count("pwritev") == 3, "old, 1st and 3rd"

    run(test)


@pytest.mark.parametrize("comes", ["never", "soon"])
def test_a_signal_ends_a_request_unless_the_disk_answers_soon(run: Callable[[Test], None], comes: str) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"old")
        bench.hang("pwritev")
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, 0, b"new"))
            await bench.hung()
            write.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert not write.done.is_set()
            if comes == "soon":
                bench.trouble.go_on()
            else:
                bench.turn(INTERRUPT_GRACE_S)
        assert write.scope.cancelled_caught == (comes == "never")
        await bench.answer()
        assert await bench.has(handle) == b"new"

    run(test)


def test_bytes_that_a_disk_holds_up_are_written_as_they_were(run: Callable[[Test], None]) -> None:
    """Later requests take other memory, and use that of those before them again."""
    old, new = bytes(range(256)) * 1024, bytes(reversed(range(256))) * 1024

    async def test(bench: Bench) -> None:
        handle, other = await bench.new("a"), await bench.new("b", old)
        bench.hang("pwritev", whose=handle)
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, 0, old))
            await bench.hung()
            bench.turn()
        assert has_timed_out(write)
        for _ in range(3):
            await bench.files.write(other, 0, new)
        found = [await bench.files.read(other, 0, 1 << 20) for _ in range(3)]
        assert bytes(found[1]) == new
        assert memoryview(found[2]).obj is memoryview(found[0]).obj
        await bench.answer()
        assert await bench.has(handle) == old

    run(test)


def test_requests_that_wait_for_the_disk_take_no_more_memory_than_they_have_bytes(run: Callable[[Test], None]) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async def test(bench: Bench) -> None:
        handles = [await bench.new(str(number), b"old") for number in range(100)]
        bench.hang()
        before = resident_bytes()
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(bench.files.write, handle, 0, b"new")
                nursery.start_soon(bench.files.read, handle, 0, 1 << 20)
            await trio.testing.wait_all_tasks_blocked()
            taken = resident_bytes() - before
            bench.trouble.go_on()
        assert taken < len(handles) * BUFFER_BYTES / 4

    run(test)


def test_reads_that_the_disk_does_not_answer_leave_threads_to_others(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        handle, other = await bench.new("a", bytes(1 << 20)), await bench.new("b", bytes(1 << 20))
        bench.hang("pread", "preadv", whose=handle)
        async with trio.open_nursery() as nursery:
            reads = [start(nursery, lambda: bench.files.read(handle, 0, 1 << 20)) for _ in range(100)]
            for _ in range(MAX_THREADS_OF_A_FILE):
                await bench.hung()
            assert len(await bench.files.read(other, 0, 1 << 20)) == 1 << 20
            bench.turn()
        assert all(map(has_timed_out, reads))
        assert not bench.trouble.entered.acquire(blocking=False), "no other thread has asked"

    run(test)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_says_so_and_nothing_is_charged(run: Callable[[Test], None], code: int) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"old")
        inode = handle.file.inode
        for call, request in {
            "pwritev": lambda: bench.files.write(handle, 0, bytes(100)),
            "ftruncate": lambda: bench.files.truncate(inode, inode.number, 100, handle),
            "allocate": lambda: bench.files.allocate(handle, 0, 100),
        }.items():
            bench.trouble.fail(call, code)
            with pytest.raises(SymError) as caught:
                await request()
            assert caught.value.errno == code
            bench.trouble.mend()
            assert (bench.charged, bench.volume.size_of(inode)) == (3, 3)
        assert await bench.has(handle) == b"old"
        bench.trouble.fail("preadv", code)
        bench.trouble.fail("pread", code)
        with pytest.raises(SymError) as caught:
            await bench.has(handle)
        assert caught.value.errno == code
        bench.trouble.mend()

    run(test)


def test_a_file_that_the_disk_holds_up_can_be_emptied_and_written(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"old")
        inode = handle.file.inode
        bench.hang("pwritev")
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, 0, bytes(1000)))
            await bench.hung()
            bench.turn()
        assert has_timed_out(write)
        again = await bench.open(inode, truncate=True)
        assert (bench.charged, bench.volume.size_of(inode)) == (0, 0)
        bench.hang("nothing")
        await bench.files.write(again, 0, b"new")
        await bench.answer()
        assert await bench.has(handle) == b"new"
        assert bench.charged == 3

    run(test)


def test_a_file_that_the_disk_holds_up_can_be_removed(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"old")
        bench.hang()
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, 0, bytes(1000)))
            await bench.hung()
            bench.turn()
        assert has_timed_out(write)
        bench.volume.tree.unlink(bench.volume.tree.root, b"a")
        handle.wrote = False
        await bench.files.release(handle)
        assert bench.charged == 0
        bench.fs.check()

    run(test)


def test_a_cut_that_the_disk_does_not_answer_is_given_up_too(run: Callable[[Test], None]) -> None:
    """The file is cut by name: nobody has it open then."""

    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"0123456789")
        inode = handle.file.inode
        await bench.files.release(handle)
        bench.hang("ftruncate")
        async with trio.open_nursery() as nursery:
            cut = start(nursery, lambda: bench.files.truncate(inode, inode.number, 4, None))
            await bench.hung()
            bench.turn()
        assert has_timed_out(cut)
        assert bench.charged == 10
        bench.fs.check()
        await bench.answer()
        assert (bench.charged, bench.volume.size_of(inode)) == (4, 4)
        assert await bench.has(await bench.open(inode)) == b"0123"

    run(test)


def test_who_waits_behind_an_import_has_his_whole_time_after_it(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        image = bench.image(100)
        handle = await bench.new("a", image)
        bench.hang("preadv")
        async with trio.open_nursery() as nursery:
            close = start(nursery, lambda: bench.files.flush(handle))
            await bench.hung()
            cut = start(nursery, lambda: bench.files.truncate(handle.file.inode, handle.node, 5, handle))
            bench.turn(DEADLINE_S - 1)
            await trio.testing.wait_all_tasks_blocked()
            bench.trouble.go_on()
            await close.done.wait()
        assert close.error is None
        assert cut.error is not None
        assert cut.error.errno == errno.EINVAL, "it is a KV file now, whose images are longer"

    run(test)


@pytest.mark.parametrize("ending", ["deadline", "signal"])
def test_an_import_that_the_disk_does_not_answer_keeps_its_pages_until_it_does(
    run: Callable[[Test], None], ending: str
) -> None:
    async def test(bench: Bench) -> None:
        image = bench.image(100)
        pool = bench.fs.pool
        handle, other = await bench.new("a", image), await bench.new("b", image)
        assert pool.num_free == pool.num_pages
        bench.hang("preadv", whose=handle)
        async with trio.open_nursery() as nursery:
            close = start(nursery, lambda: bench.files.flush(handle))
            await bench.hung()
            if ending == "signal":
                close.scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                bench.turn(INTERRUPT_GRACE_S)
            else:
                bench.turn()
        assert close.scope.cancelled_caught if ending == "signal" else has_timed_out(close)
        bench.fs.check()
        assert pool.num_pages - pool.num_free == 4
        await bench.files.flush(other)
        assert isinstance(other.file.inode.content, KvFile), "other imports go on"
        assert isinstance(handle.file.inode.content, PlainFile)
        await bench.answer()
        assert pool.num_pages - pool.num_free == 4, "those of the other one"
        assert bench.charged == len(image)
        handle.wrote = True
        await bench.files.flush(handle)
        assert isinstance(handle.file.inode.content, KvFile)
        assert bench.charged == 0

    run(test)


def test_a_file_is_not_taken_for_an_image_while_something_may_be_written_to_it(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        image = bench.image(100)
        handle = await bench.new("a", image)
        bench.hang("pwritev")
        async with trio.open_nursery() as nursery:
            write = start(nursery, lambda: bench.files.write(handle, len(image) - 1, b"\xff"))
            await bench.hung()
            bench.turn()
            await write.done.wait()
            close = start(nursery, lambda: bench.files.flush(handle))
            await trio.testing.wait_all_tasks_blocked()
            bench.turn()
        assert has_timed_out(close)
        await bench.answer()
        with pytest.raises(SymError) as caught:
            await bench.files.flush(handle)
        assert caught.value.errno == errno.EINVAL

    run(test)


def test_an_open_file_is_opened_below_once_however_often_it_is_opened(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"text")
        inode = handle.file.inode
        for _ in range(3):
            await bench.files.release(handle)
            handle = await bench.open(inode)
            assert await bench.has(handle) == b"text"
        assert bench.trouble.calls.count("open") == 1

    run(test)


def test_a_file_gets_another_backing_file_each_time_it_becomes_plain(run: Callable[[Test], None]) -> None:
    async def test(bench: Bench) -> None:
        handle = await bench.new("a", b"text")
        inode, names = handle.file.inode, set()
        for _ in range(3):
            assert isinstance(inode.content, PlainFile)
            names.add(inode.content.path.name)
            await bench.files.truncate(inode, inode.number, 0, handle)
            await bench.files.write(handle, 0, b"more")
        assert len(names) == 3
        assert all(name.startswith(f"{inode.number}.") for name in names)

    run(test)
