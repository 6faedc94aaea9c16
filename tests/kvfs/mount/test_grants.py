"""Attributes that a kernel was granted are withdrawn by a message, here without a kernel."""

import errno
import stat
from collections.abc import Awaitable, Callable
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
from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.accounts import Accounts
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeFacts, FakeStore


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
    kernel.tree.forget(inode, 1)
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
        kernel.tree.forget(gone, 1)
        await trio.sleep(REPEAT_S)
        kernel.error = 0
        await trio.sleep(10 * REPEAT_S)
        assert kernel.told.count(gone.number) == 4
        assert kernel.told.count(late.number) == 5
        assert kernel.grants.valid_s(late, late.number) == VALID_S
        nursery.cancel_scope.cancel()


def test_an_inode_that_is_forgotten_while_an_answer_is_on_its_way_is_told_of(tmp_path: Path) -> None:
    facts = FakeFacts()
    fs = FileSystem(PagePool(FakeStore(facts, num_pages=1)), facts, tmp_path / "backing", 0, 0)
    kernel, eager = Kernel(fs.volume.tree), Eager()
    answers = Answers(memoryview(bytearray(4096)), len)
    files = FileHandlers(fs.volume, answers, eager, WaitingChanges(eager, at_once), lambda: 0, kernel.grants)
    number = fs.volume.make_plain(fs.volume.tree.root, b"a", 0o644, 0, 0).number
    for _ in range(3):
        files.lookup(1, b"a")
    files.forget(number, 2)
    assert kernel.told == [number]
    files.forget(number, 1)
    assert kernel.told == [number]
    fs.close()
