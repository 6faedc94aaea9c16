"""Requests for plain files on a disk that hangs or fails: see `bench`."""

import errno
import resource
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.mount.buffers import BUFFER_BYTES
from kvfs.mount.disk_work import INTERRUPT_GRACE_S, MAX_THREADS_OF_A_FILE
from kvfs.names.content import KvFile
from kvfs.names.plain import PlainFile
from libsym.errors import SymError
from tests.kvfs.mount.bench import DEADLINE_S, Bench, start


@pytest.mark.parametrize("size", [100, 1 << 20])
async def test_a_write_that_the_disk_does_not_answer_is_given_up_and_may_still_be_done(
    bench: Bench, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    handle, other = await bench.new("a", b"old"), await bench.new("b", b"other")
    inode = handle.file.inode
    bench.hang("pwritev", whose=handle)
    async with trio.open_nursery() as nursery:
        write = start(nursery, bench.files.write, handle, 3, bytes(size))
        await bench.hung()
        bench.turn(DEADLINE_S - 1)
        await bench.files.write(other, 5, b"s")
        assert await bench.has(other) == b"others", "meanwhile"
        assert not write.done.is_set()
        bench.turn(1)
    assert write.timed_out
    assert "backing does not answer" in str(write.error)
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


async def test_what_comes_later_is_never_overwritten_by_what_was_given_up(bench: Bench) -> None:
    """A request's deadline begins when the request comes. A write that times out before it began is not done."""
    handle = await bench.new("a", b"old")
    bench.hang("pwritev")
    async with trio.open_nursery() as nursery:
        first = start(nursery, bench.files.write, handle, 0, b"1st")
        await bench.hung()
        bench.turn(10)
        second = start(nursery, bench.files.write, handle, 0, b"2nd")
        await trio.testing.wait_all_tasks_blocked()
        bench.turn(10)
        third = start(nursery, bench.files.write, handle, 0, b"3rd")
        await trio.testing.wait_all_tasks_blocked()
        bench.turn(10)
        await first.done.wait()
        assert not second.done.is_set()
        bench.turn(10)
        await second.done.wait()
        assert not third.done.is_set()
        bench.trouble.go_on()
    assert first.timed_out
    assert second.timed_out
    assert third.error is None
    assert await bench.has(handle) == b"3rd"
    assert bench.trouble.calls.count("pwritev") == 3, "old, 1st and 3rd"


@pytest.mark.parametrize("comes", ["never", "soon"])
async def test_a_signal_ends_a_request_unless_the_disk_answers_soon(bench: Bench, comes: str) -> None:
    handle = await bench.new("a", b"old")
    bench.hang("pwritev")
    async with trio.open_nursery() as nursery:
        write = start(nursery, bench.files.write, handle, 0, b"new")
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


async def test_bytes_that_a_disk_holds_up_are_written_as_they_were(bench: Bench) -> None:
    """Later requests take other memory, and use that of those before them again."""
    old, new = bytes(range(256)) * 1024, bytes(reversed(range(256))) * 1024
    handle, other = await bench.new("a"), await bench.new("b", old)
    bench.hang("pwritev", whose=handle)
    await bench.given_up(bench.files.write, handle, 0, old)
    for _ in range(3):
        await bench.files.write(other, 0, new)
    found = [await bench.files.read(other, 0, 1 << 20) for _ in range(3)]
    assert bytes(found[1]) == new
    assert memoryview(found[2]).obj is memoryview(found[0]).obj
    await bench.answer()
    assert await bench.has(handle) == old


async def test_requests_that_wait_for_the_disk_take_no_more_memory_than_they_have_bytes(bench: Bench) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

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


async def test_reads_that_the_disk_does_not_answer_leave_threads_to_others(bench: Bench) -> None:
    handle, other = await bench.new("a", bytes(1 << 20)), await bench.new("b", bytes(1 << 20))
    bench.hang("pread", "preadv", whose=handle)
    async with trio.open_nursery() as nursery:
        reads = [start(nursery, bench.files.read, handle, 0, 1 << 20) for _ in range(100)]
        for _ in range(MAX_THREADS_OF_A_FILE):
            await bench.hung()
        assert len(await bench.files.read(other, 0, 1 << 20)) == 1 << 20
        bench.turn()
    assert all(read.timed_out for read in reads)
    assert not bench.trouble.entered.acquire(blocking=False), "no other thread has asked"


async def test_a_disk_that_fails_says_so_and_nothing_is_charged(bench: Bench) -> None:
    handle = await bench.new("a", b"old")
    inode = handle.file.inode
    for code in (errno.EIO, errno.ENOSPC):
        for calls, request, *arguments in (
            (["pwritev"], bench.files.write, handle, 0, bytes(100)),
            (["ftruncate"], bench.files.truncate, inode, inode.number, 100, handle),
            (["allocate"], bench.files.allocate, handle, 0, 100),
            (["preadv", "pread"], bench.has, handle),
        ):
            for call in calls:
                bench.trouble.fail(call, code)
            with pytest.raises(SymError) as caught:
                await request(*arguments)
            assert caught.value.errno == code
            bench.trouble.mend()
            assert (bench.charged, bench.volume.size_of(inode)) == (3, 3)
            assert await bench.has(handle) == b"old"


async def test_a_file_that_the_disk_holds_up_can_be_emptied_and_written(bench: Bench) -> None:
    handle = await bench.new("a", b"old")
    inode = handle.file.inode
    bench.hang("pwritev")
    await bench.given_up(bench.files.write, handle, 0, bytes(1000))
    again = await bench.open(inode, truncate=True)
    assert (bench.charged, bench.volume.size_of(inode)) == (0, 0)
    bench.hang("nothing")
    await bench.files.write(again, 0, b"new")
    await bench.answer()
    assert await bench.has(handle) == b"new"
    assert bench.charged == 3


async def test_a_cut_that_the_disk_does_not_answer_is_given_up_too(bench: Bench) -> None:
    """The file is cut by name: nobody has it open then."""
    handle = await bench.new("a", b"0123456789")
    inode = handle.file.inode
    await bench.files.release(handle)
    bench.hang("ftruncate")
    await bench.given_up(bench.files.truncate, inode, inode.number, 4, None)
    assert bench.charged == 10
    bench.fs.check()
    await bench.answer()
    assert (bench.charged, bench.volume.size_of(inode)) == (4, 4)
    assert await bench.has(await bench.open(inode)) == b"0123"


async def test_who_waits_behind_an_import_has_his_whole_time_after_it(bench: Bench) -> None:
    handle = await bench.new("a", bench.image(100))
    bench.hang("preadv")
    async with trio.open_nursery() as nursery:
        close = start(nursery, bench.files.flush, handle)
        await bench.hung()
        cut = start(nursery, bench.files.truncate, handle.file.inode, handle.node, 5, handle)
        bench.turn(DEADLINE_S - 1)
        await trio.testing.wait_all_tasks_blocked()
        bench.trouble.go_on()
        await close.done.wait()
    assert close.error is None
    assert cut.error is not None
    assert cut.error.errno == errno.EINVAL, "it is a KV file now, whose images are longer"


@pytest.mark.parametrize("ending", ["deadline", "signal"])
async def test_an_import_that_the_disk_does_not_answer_keeps_its_pages_until_it_does(bench: Bench, ending: str) -> None:
    image, pool = bench.image(100), bench.fs.pool
    handle, other = await bench.new("a", image), await bench.new("b", image)
    assert pool.num_free == pool.num_pages
    bench.hang("preadv", whose=handle)
    async with trio.open_nursery() as nursery:
        close = start(nursery, bench.files.flush, handle)
        await bench.hung()
        if ending == "signal":
            close.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
        bench.turn(INTERRUPT_GRACE_S if ending == "signal" else DEADLINE_S)
    assert close.scope.cancelled_caught if ending == "signal" else close.timed_out
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


async def test_a_file_is_not_taken_for_an_image_while_something_may_be_written_to_it(bench: Bench) -> None:
    image = bench.image(100)
    handle = await bench.new("a", image)
    bench.hang("pwritev")
    await bench.given_up(bench.files.write, handle, len(image) - 1, b"\xff")
    async with trio.open_nursery() as nursery:
        close = start(nursery, bench.files.flush, handle)
        await trio.testing.wait_all_tasks_blocked()
        bench.turn()
    assert close.timed_out
    await bench.answer()
    with pytest.raises(SymError) as caught:
        await bench.files.flush(handle)
    assert caught.value.errno == errno.EINVAL
