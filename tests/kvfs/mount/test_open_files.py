"""Handles of regular files on the mount."""

from collections.abc import Iterator

from kvfs.mount.open_files import Handle
from kvfs.names.inode import Credentials
from kvfs.names.plain import PlainFile
from tests.kvfs.mount.bench import Bench


class Counted(set[Handle]):
    """Set that counts the handles read one by one."""

    num_seen = 0

    def __iter__(self) -> Iterator[Handle]:
        for each in super().__iter__():
            self.num_seen += 1
            yield each


async def test_a_lookup_and_an_open_look_at_no_other_handle(bench: Bench) -> None:
    kv, files = bench.fs.kv_create(Credentials(0, 0), "a.kv"), bench.files
    bench.append(kv, range(10))

    async def opened(*, writable: bool = True) -> Handle:
        return await files.open(kv.inode, files.node_of(kv.inode), readable=True, writable=writable)

    node = files.node_of(kv.inode)
    handles = [await opened(writable=number % 2 == 0) for number in range(100)]
    counted = handles[0].file.handles = Counted(handles)
    handles.append(await opened())
    assert files.node_of(kv.inode) == node
    assert not counted.num_seen
    for each in handles[1::2]:
        await files.release(each)
    bench.append(kv, [1])
    assert files.node_of(kv.inode) != node, "handles that go past the page cache read the older version"
    for each in handles[::2]:
        await files.release(each)
    assert files.node_of(kv.inode) == kv.inode.number
    bench.fs.kv_close(kv)


async def test_an_open_file_is_opened_below_once_however_often_it_is_opened(bench: Bench) -> None:
    handle = await bench.new("a", b"text")
    inode = handle.file.inode
    for _ in range(3):
        await bench.files.release(handle)
        handle = await bench.open(inode)
        assert await bench.has(handle) == b"text"
    assert bench.trouble.calls.count("open") == 1


async def test_a_file_gets_another_backing_file_each_time_it_becomes_plain(bench: Bench) -> None:
    handle = await bench.new("a", b"text")
    inode, names = handle.file.inode, set()
    for _ in range(3):
        assert isinstance(inode.content, PlainFile)
        names.add(inode.content.path.name)
        await bench.files.truncate(inode, inode.number, 0, handle)
        await bench.files.write(handle, 0, b"more")
    assert len(names) == 3
    assert all(name.startswith(f"{inode.number}.") for name in names)
