"""Handles of regular files on the mount."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import trio

from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import Handle, OpenFiles
from tests.kvfs.durable.house import House, running


class Counted(set[Handle]):
    """Set that counts the handles read one by one."""

    num_seen = 0

    def __iter__(self) -> Iterator[Handle]:
        for each in super().__iter__():
            self.num_seen += 1
            yield each


def test_a_lookup_and_an_open_look_at_no_other_handle(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(House(tmp_path)) as house:
            kv = house.create("a.kv", range(10))
            files = OpenFiles(house.volume, Eager(), Nodes(house.tree))
            node = files.node_of(kv.inode)
            handles = [
                await files.open(kv.inode, node, readable=True, writable=number % 2 == 0) for number in range(100)
            ]
            counted = handles[0].file.handles = Counted(handles)
            handles.append(await files.open(kv.inode, files.node_of(kv.inode), readable=True, writable=True))
            assert files.node_of(kv.inode) == node
            assert not counted.num_seen
            for each in handles[1::2]:
                await files.release(each)
            house.append(kv, [1])
            newer = files.node_of(kv.inode)
            assert newer != node, "handles that go past the page cache read the older version"
            for each in handles[::2]:
                await files.release(each)
            assert files.node_of(kv.inode) == kv.inode.number
            house.fs.kv_close(kv)

    trio.run(main)
