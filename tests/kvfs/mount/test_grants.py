"""Attributes that a kernel was granted are withdrawn by a message, here without a kernel."""

import errno
import os
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.fs import FileSystem
from kvfs.mount.eager import Eager
from kvfs.mount.grants import REPEAT_S, VALID_S, Grants
from kvfs.mount.handlers import FileHandlers
from kvfs.mount.waiting_changes import WaitingChanges, at_once
from kvfs.mount.wire import Answers
from kvfs.names.inode import Credentials, Inode
from kvfs.names.tree import Tree
from kvfs.pages.accounts import Accounts
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all


class Kernel:
    """Gets the messages, and answers them with `error`."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.error = 0
        self.told: list[int] = []
        self.tree = tree or Tree(Accounts(0, 1), 0, 0, discard=lambda _inode: None)
        self.grants = Grants(self.tree, self.tell)

    def run_test(self, main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    def tell(self, number: int) -> int:
        self.told.append(number)
        return -self.error

    def known(self, name: bytes) -> Inode:
        inode = self.tree.make(self.tree.root, name, stat.S_IFREG, mode=0o644, uid=0, gid=0)
        inode.lookups = 1
        return inode


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system with the handlers of its mount."""

    fs: FileSystem
    kernel: Kernel
    handlers: FileHandlers
    eager: Eager
    out: memoryview

    def lookup(self, parent: int, name: bytes) -> tuple[int, int]:
        """Return the node of the answer, and the time for which its attributes are granted."""
        self.handlers.lookup(parent, name)
        node, _, _, valid_s = struct.unpack_from("=QQQQ", self.out)
        return node, valid_s

    def open(self, node: int) -> int:
        """Open a file for reading. Return the number of the handle."""
        self.eager.start(self.handlers.open(node, os.O_RDONLY, 0, 0))
        handle: int
        (handle,) = struct.unpack_from("=Q", self.out)
        return handle


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_only_the_first_change_of_granted_attributes_is_told(kernel: Kernel) -> None:
    inode = kernel.known(b"a")
    inode.changed()
    assert kernel.told == []
    assert kernel.grants.valid_s(inode, inode.number) == VALID_S
    inode.changed()
    inode.modified()
    assert kernel.told == [inode.number]
    assert kernel.grants.valid_s(inode, inode.number) == VALID_S
    inode.note_change()
    assert kernel.told == [inode.number] * 2


def test_open_files_and_nodes_of_other_versions_are_granted_nothing_and_an_open_is_told(kernel: Kernel) -> None:
    inode = kernel.known(b"a")
    assert kernel.grants.valid_s(inode, inode.number + 1) == 0
    assert kernel.grants.valid_s(inode, inode.number) == VALID_S
    kernel.tree.opened(inode)
    assert kernel.told == [inode.number]
    assert kernel.grants.valid_s(inode, inode.number) == 0
    kernel.tree.closed(inode)
    assert kernel.grants.valid_s(inode, inode.number) == VALID_S


def test_directories_are_granted_while_they_are_listed(kernel: Kernel) -> None:
    directory = kernel.tree.make(kernel.tree.root, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
    kernel.tree.opened(directory)
    assert kernel.grants.valid_s(directory, directory.number) == VALID_S
    kernel.tree.make(directory, b"a", stat.S_IFREG, mode=0o644, uid=0, gid=0)
    assert kernel.told == [directory.number]


def test_a_forgotten_inode_is_not_told_of(kernel: Kernel) -> None:
    inode = kernel.known(b"a")
    kernel.grants.valid_s(inode, inode.number)
    kernel.grants.forgotten(inode, is_known=False)
    inode.changed()
    assert kernel.told == []


async def test_a_change_is_told_again_until_the_kernel_knows_the_inode_or_forgets_it(kernel: Kernel) -> None:
    late, gone = kernel.known(b"late"), kernel.known(b"gone")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.grants.repeat)
        for inode in (late, gone):
            kernel.grants.valid_s(inode, inode.number)
        kernel.error = errno.ENOENT
        for inode in (late, gone):
            inode.changed()
        await trio.sleep(2.5 * REPEAT_S)
        assert sorted(kernel.told) == [late.number] * 3 + [gone.number] * 3
        assert kernel.grants.valid_s(late, late.number) == 0
        kernel.grants.forgotten(gone, is_known=False)
        await trio.sleep(REPEAT_S)
        kernel.error = 0
        await trio.sleep(10 * REPEAT_S)
        assert kernel.told.count(gone.number) == 3
        assert kernel.told.count(late.number) == 5
        assert kernel.grants.valid_s(late, late.number) == VALID_S
        nursery.cancel_scope.cancel()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    facts = FakeFacts()
    fs = FileSystem(PagePool(FakeStore(facts, num_pages=1)), facts, tmp_path / "backing", 0, 0)
    kernel, eager, out = Kernel(fs.volume.tree), Eager(), memoryview(bytearray(4096))
    changes = WaitingChanges(eager, at_once)
    handlers = FileHandlers(fs.volume, Answers(out, len), eager, changes, lambda: 0, kernel.grants)
    yield Mount(fs, kernel, handlers, eager, out)
    fs.close()


def test_an_inode_that_is_forgotten_while_an_answer_is_on_its_way_is_told_of(mount: Mount) -> None:
    number = mount.fs.volume.make_plain(mount.fs.volume.tree.root, b"a", 0o644, 0, 0).number
    for _ in range(3):
        assert mount.lookup(1, b"a") == (number, VALID_S)
    mount.handlers.forget(number, 2)
    assert mount.kernel.told == [number]
    mount.handlers.forget(number, 1)
    assert mount.kernel.told == [number]


async def test_an_inode_of_which_the_kernel_knows_only_an_older_version_is_not_told_of(mount: Mount) -> None:
    """Otherwise the message would be repeated for as long as a program holds that version."""
    root = Credentials(0, 0)
    mount.fs.kv_close(mount.fs.kv_create(root, "a", 0o600))
    number, _ = mount.lookup(1, b"a")
    handle = mount.open(number)
    writer = mount.fs.kv_open(root, "a", write=True)
    commit_all(mount.fs.reserve(writer, [1], range(1)))
    mount.fs.committed(writer)
    mount.fs.kv_close(writer)
    newer, _ = mount.lookup(1, b"a")
    assert newer != number
    mount.eager.start(mount.handlers.release(handle))
    assert mount.lookup(1, b"a") == (number, VALID_S)
    told = len(mount.kernel.told)
    mount.handlers.forget(number, 2)
    mount.fs.kv_chmod(root, "a", 0o640)
    assert len(mount.kernel.told) == told
    assert mount.lookup(1, b"a") == (number, VALID_S)
    mount.handlers.forget(number, 1)
    mount.handlers.forget(newer, 1)


def test_the_parent_of_a_file_handle_is_granted_nothing(mount: Mount) -> None:
    """The parent may be the root, of which the kernel keeps no attributes."""
    tree = mount.fs.volume.tree
    number = tree.make(tree.root, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0).number
    assert mount.lookup(1, b"d") == (number, VALID_S)
    assert mount.lookup(number, b"..") == (1, 0)
