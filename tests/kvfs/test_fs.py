"""The file system as the gate uses it."""

import errno
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import trio

from kvfs.facts import xattrs
from kvfs.facts.du import Denied, DuRow, total, walk
from kvfs.fs import Claim, FileSystem, OpenKv
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import NAME_BYTES, AccountLimits
from kvfs.pages.pool import PagePool
from libsym.abi import Advice
from libsym.errors import (
    BadHandle,
    Busy,
    Exists,
    Invalid,
    IsDirectory,
    NoAccess,
    NoSpace,
    NotDirectory,
    NotFound,
    NotPermitted,
    OverQuota,
    SymError,
)
from tests.kvfs.core.model import FREE_NAMES
from tests.kvfs.disks import TroubledDisk
from tests.kvfs.fakes import FakeFacts, commit_all, listing

ROOT = Credentials(0, 0)
ANN = Credentials(1000, 1000)
BOB = Credentials(1001, 1001, frozenset({1000}))
STRANGER = Credentials(5, 5)


def append(fs: FileSystem, handle: OpenKv, count: int) -> None:
    start = handle.table.next_position
    commit_all(fs.reserve(handle, range(1, count + 1), range(start, start + count)))
    fs.committed(handle)


def make_directory(fs: FileSystem, path: str, mode: int = 0o755, uid: int = ANN.uid) -> Inode:
    return fs.volume.tree.make(fs.volume.tree.root, path.encode(), stat.S_IFDIR, mode=mode, uid=uid, gid=uid)


def names(fs: FileSystem, path: str = "") -> list[str]:
    return [entry.name for entry in listing(fs, ROOT, path)]


class World(NamedTuple):
    """A file of some entries, ann's directory with a file of hers, and handles that can do little."""

    fs: FileSystem
    base: OpenKv
    reader: OpenKv
    closed: OpenKv
    busy: OpenKv


@pytest.fixture
def world(fs: FileSystem) -> Iterator[World]:
    base, closed, busy = fs.kv_create(ANN, "a.kv", 0o640), fs.kv_create(ANN, None), fs.kv_create(ANN, None)
    append(fs, base, 4)
    fs.kv_close(closed)
    reservation = fs.reserve(busy, [1], [0])
    fs.volume.make_plain(fs.volume.tree.root, b"plain", 0o644, 1000, 1000)
    make_directory(fs, "d")
    fs.kv_create(ANN, "d/a.kv")
    yield World(fs, base, fs.kv_open(ANN, "a.kv", write=False), closed, busy)
    reservation.abort()


SOME = np.array([[0, 4]])
REFUSED: list[tuple[Callable[[World], object], type[SymError], str]] = [
    (lambda w: w.fs.kv_create(ANN, "a.kv"), Exists, ""),
    (lambda w: w.fs.kv_create(ANN, "new/"), IsDirectory, ""),
    (lambda w: w.fs.kv_create(BOB, "d/b.kv"), NoAccess, ""),
    (lambda w: w.fs.kv_create(BOB, "d/a.kv"), Exists, ""),
    (lambda w: w.fs.kv_open(ANN, "none.kv", write=False), NotFound, ""),
    (lambda w: w.fs.kv_open(BOB, "a.kv", write=True), NoAccess, "write"),
    (lambda w: w.fs.kv_open(STRANGER, "a.kv", write=False), NoAccess, "read it; choose .* or have uid 1000 or root"),
    (lambda w: w.fs.kv_open(ANN, "plain", write=False), Invalid, "plain is not a KV file"),
    (lambda w: w.fs.kv_open(ANN, "d", write=False), IsDirectory, ""),
    (lambda w: w.fs.kv_remove(ANN, "d"), IsDirectory, ""),
    (lambda w: w.fs.kv_remove(BOB, "d/a.kv"), NoAccess, ""),
    (lambda w: listing(w.fs, ANN, "plain"), NotDirectory, ""),
    (lambda w: w.fs.kv_rename(BOB, "d/a.kv", "b.kv"), NoAccess, ""),
    (lambda w: w.fs.kv_rename(ANN, "a.kv", "x/"), NotDirectory, ""),
    (lambda w: w.fs.kv_fork(BOB, w.base, "d/b.kv"), NoAccess, ""),
    (lambda w: w.fs.kv_open_or_claim(BOB, "d/b.kv", write=False), NoAccess, ""),
    (lambda w: w.fs.kv_mkdir(BOB, "d/b", 0o700), NoAccess, ""),
    (lambda w: w.fs.kv_chmod(BOB, "a.kv", 0o666), NotPermitted, ""),
    (lambda w: w.fs.kv_chmod(ANN, "a.kv", 0o10000), Invalid, ""),
    (lambda w: w.fs.reserve(w.reader, [1], [0]), BadHandle, "reading only"),
    (lambda w: w.fs.kv_truncate(w.reader, 0), BadHandle, "reading only"),
    (lambda w: w.fs.reserve(w.busy, [1], [9]), Busy, "appending"),
    (lambda w: w.fs.kv_truncate(w.busy, 0), Busy, "appending"),
    (lambda w: append(w.fs, w.base, 32 * 16), NoSpace, ""),
    (lambda w: w.fs.kv_close(w.closed), BadHandle, ""),
    (lambda w: w.fs.kv_name(ANN, w.closed, write=False), BadHandle, ""),
    (lambda w: w.fs.kv_fork(ANN, w.closed, None), BadHandle, ""),
    (lambda w: w.fs.kv_remove_open(ANN, w.closed), BadHandle, ""),
    (lambda w: w.fs.kv_advise_open(ANN, w.closed, [(Advice.PIN, 0)]), BadHandle, ""),
    (lambda w: w.fs.kv_stat_open(w.closed), BadHandle, ""),
    (lambda w: w.fs.begin_extract(ANN, w.base, SOME, "a.kv", 0o600, rebase=True), Exists, ""),
    (lambda w: w.fs.begin_extract(ANN, w.base, SOME, "no/such.kv", 0o600, rebase=True), NotFound, ""),
    (lambda w: w.fs.begin_extract(ANN, w.base, SOME + 1, None, 0o600, rebase=True), Invalid, "it has 4 entries"),
    (lambda w: w.fs.begin_extract(ANN, w.closed, SOME, None, 0o600, rebase=True), BadHandle, ""),
    (lambda w: w.fs.begin_merge(ANN, [w.closed], None, 0o600, rebase=True), BadHandle, ""),
    (lambda w: w.fs.begin_merge(ANN, [w.base] * 257, None, 0o600, rebase=True), Invalid, "256 is the most"),
]


def test_what_makes_no_sense_or_is_not_allowed_is_refused_and_changes_nothing(world: World) -> None:
    fs = world.fs
    before = fs.pool.num_free, fs.statfs(), fs.kv_stat(ANN, "a.kv")
    for number, (call, error, words) in enumerate(REFUSED):
        with pytest.raises(error, match=words or None):
            call(world)
        assert (fs.pool.num_free, fs.statfs(), fs.kv_stat(ANN, "a.kv")) == before, number
        assert (names(fs), names(fs, "d")) == (["a.kv", "d", "plain"], ["a.kv"]), number


def test_a_fork_whose_pages_and_name_do_not_fit_together_is_refused_and_leaves_nothing(fs: FileSystem) -> None:
    source = fs.kv_create(ANN, "a.kv", 0o644)
    append(fs, source, 40)
    account, theirs = fs.pool.accounts.of(BOB.uid), fs.kv_open(BOB, "a.kv", write=False)
    for _ in range(FREE_NAMES):
        fs.kv_create(BOB, None)
    account.limits = AccountLimits(num_bytes=2 * fs.pool.page_bytes + NAME_BYTES - 1)
    with pytest.raises(OverQuota):
        fs.kv_fork(BOB, theirs, None)
    assert account.num_bytes == 0
    fs.check()
    account.limits = AccountLimits(num_bytes=2 * fs.pool.page_bytes + NAME_BYTES)
    assert fs.kv_fork(BOB, theirs, None).table.length == 40


def test_a_claimed_file_has_its_name_when_it_is_given_it_and_gives_the_claim_back(fs: FileSystem) -> None:
    claim = fs.kv_open_or_claim(ANN, "a.kv", write=False)
    assert isinstance(claim, Claim)
    fs.claims.acquire_nowait(claim.key, claim, exclusive=True)
    handle = fs.kv_create_claimed(ANN, claim, 0o640)
    commit_all(fs.reserve(handle, [1, 2], [0, 1]))
    assert names(fs) == []
    fs.kv_name(ANN, handle, write=False)
    assert len(fs.claims) == 0
    assert (fs.kv_stat(BOB, "a.kv").tokens, fs.kv_stat(BOB, "a.kv").mode) == (2, 0o640)
    with pytest.raises(Invalid, match="has claimed no name, or was given it already"):
        fs.kv_name(ANN, handle, write=False)
    with pytest.raises(BadHandle, match="for reading only"):
        fs.kv_truncate(handle, 0)
    fs.kv_remove_open(ANN, handle)
    fs.kv_close(handle)


def test_a_file_of_another_user_is_not_taken_for_one_that_was_to_be_computed(fs: FileSystem) -> None:
    fs.kv_close(fs.kv_create(ANN, "anns.kv", 0o644))
    fs.kv_close(fs.kv_create(ROOT, "roots.kv", 0o644))
    for who, path, owner in (
        (ANN, "anns.kv", 0),
        (BOB, "roots.kv", 0),
        (BOB, "anns.kv", ANN.uid),
        (BOB, "anns.kv", None),
    ):
        handle = fs.kv_open_or_claim(who, path, write=False, owner=owner)
        assert isinstance(handle, OpenKv)
        fs.kv_close(handle)
    for who, owner in ((BOB, 0), (BOB, 1005), (ROOT, 0)):
        with pytest.raises(NoAccess, match=r"anns\.kv: is a file of uid 1000.*owner=1000"):
            fs.kv_open_or_claim(who, "anns.kv", write=False, owner=owner)
    assert fs.kv_stat(ANN, "anns.kv").nlink == 1
    assert fs.volume.tree.root.entries[b"anns.kv"].opens == 0, "no handle is left"


def test_removing_by_handle_follows_a_rename_and_removes_no_name_that_the_caller_does_not_know(fs: FileSystem) -> None:
    handle = fs.kv_create(ANN, "a.kv")
    fs.kv_rename(ANN, "a.kv", "b.kv")
    for path in ("a.kv", "none.kv"):
        with pytest.raises(NotFound, match=path):
            fs.kv_remove_open(ANN, handle, path)
    fs.kv_create(ANN, "a.kv")
    fs.kv_remove_open(ANN, handle)
    assert names(fs) == ["a.kv"]
    with pytest.raises(NotFound, match="it was removed"):
        fs.kv_remove_open(ANN, handle)
    append(fs, handle, 1)
    again = fs.kv_open(ANN, "a.kv", write=True)
    fs.kv_remove_open(ANN, again, "a.kv")
    assert names(fs) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_removing_by_handle_finds_the_name_in_a_directory_that_was_moved(fs: FileSystem, is_replaced: bool) -> None:
    fs.kv_mkdir(ANN, "d", 0o700)
    handle = fs.kv_create(ANN, "d/a.kv")
    fs.kv_rename(ANN, "d", "e")
    if is_replaced:
        fs.kv_create(ANN, "d")
    fs.kv_remove_open(ANN, handle, "d/a.kv")
    assert names(fs, "e") == []
    with pytest.raises(NotFound, match=r"^d/a\.kv: the open file no longer has this name"):
        fs.kv_remove_open(ANN, handle, "d/a.kv")


def test_a_name_that_has_other_content_is_not_removed_by_the_handle_of_the_old(fs: FileSystem) -> None:
    handle = fs.kv_create(ANN, "a.kv")
    fs.volume.truncate(handle.inode, 0)
    with pytest.raises(NotFound, match="replaced"):
        fs.kv_remove_open(ANN, handle, "a.kv")
    assert names(fs) == ["a.kv"]


def test_stat_tells_a_stranger_what_the_mount_does(fs: FileSystem) -> None:
    handle = fs.kv_create(ANN, "a.kv", 0o600)
    append(fs, handle, 40)
    fs.kv_advise(ANN, "a.kv", [(Advice.PIN, 0), (Advice.PRIORITY, 5)])
    mine, theirs = fs.kv_stat(ANN, "a.kv"), fs.kv_stat(BOB, "a.kv")
    assert (mine.exclusive_pages, mine.pinned, mine.ttl_s, mine.priority) == (2, True, 0, 5)
    hidden = ("exclusive_pages", "pinned", "lease_s", "ttl_s", "priority", "tier", "memory_pages", "turns")
    nothing: dict[str, Any] = dict.fromkeys(hidden)
    assert theirs == mine._replace(**nothing)
    assert fs.kv_stat_open(handle) == mine
    fs.kv_chmod(ANN, "a.kv", 0o644)
    assert fs.kv_stat(BOB, "a.kv").pinned
    fs.kv_close(handle)


def du(fs: FileSystem, path: str) -> tuple[list[DuRow], list[str], DuRow]:
    """Rows, directories that may not be read, and the sum."""
    found: list[DuRow | Denied] = []

    def visit(row: DuRow | Denied, _inode: object) -> bool:
        found.append(row)
        return True

    start = fs.find(ANN, path)
    trio.run(walk, start, path, (), ANN, visit)
    rows = [row for row in found if isinstance(row, DuRow)]
    return rows, [row.path for row in found if isinstance(row, Denied)], trio.run(total, fs.pool, start, path, ANN)


def test_a_name_that_is_a_hard_link_owns_nothing_that_its_removal_would_free(fs: FileSystem) -> None:
    tree = fs.volume.tree
    make_directory(fs, "d")
    kv = fs.kv_create(ANN, "d/a.kv")
    append(fs, kv, 64)
    assert fs.kv_stat(ANN, "d/a.kv").exclusive_pages == 2
    tree.link(kv.inode, tree.root, b"b.kv")
    assert fs.kv_stat(ANN, "d/a.kv").exclusive_pages == fs.kv_stat(ANN, "b.kv").exclusive_pages == 0
    assert [xattrs.get(fs.volume, kv.inode, name) for name in (b"user.kv.exclusive", b"user.kv.shared")] == [b"0", b"2"]
    (row,), _denied, whole = du(fs, "d")
    assert (row.exclusive_pages, row.shared_pages) == (whole.exclusive_pages, whole.shared_pages) == (0, 2)
    assert du(fs, ".")[2].exclusive_pages == 2, "who removes all of its names frees them"
    tree.unlink(tree.root, b"b.kv")
    assert du(fs, "d")[2].exclusive_pages == fs.kv_stat(ANN, "d/a.kv").exclusive_pages == 2


def test_attributes_are_bounded_together_and_one_more_costs_the_same_beside_thousands(fs: FileSystem) -> None:
    few, many = (fs.volume.make_plain(fs.volume.tree.root, name, 0o600, 0, 0) for name in (b"few", b"many"))

    def put_s(inode: Inode, value: bytes) -> float:
        began_s = time.thread_time()
        xattrs.put(fs.volume, inode, b"user.x", value, 0)
        return time.thread_time() - began_s

    xattrs.put(fs.volume, many, b"user.large", bytes(xattrs.MAX_VALUES_BYTES), 0)
    with pytest.raises(SymError, match="bytes of attributes"):
        xattrs.put(fs.volume, many, b"user.x", b"1", 0)
    xattrs.put(fs.volume, many, b"user.large", b"", 0)
    xattrs.remove(fs.volume, many, b"user.large", 0)
    for number in range(2000):
        xattrs.put(fs.volume, many, b"user.%d" % number, b"1234567890", 0)
    turns = [(put_s(many, b"%d" % i), put_s(few, b"%d" % i)) for i in range(50)]
    assert min(of_many for of_many, _ in turns) < 10 * min(of_few for _, of_few in turns)
    room = xattrs.MAX_VALUES_BYTES - 2000 * 10
    xattrs.put(fs.volume, many, b"user.x", bytes(room), 0)
    with pytest.raises(SymError, match="bytes of attributes"):
        xattrs.put(fs.volume, many, b"user.x", bytes(room + 1), 0)
    names = [b"user." + b"%d" % number * 50 for number in range(1000, 1400)]
    fit = (xattrs.MAX_NAMES_BYTES - sum(len(name) + 1 for name in many.xattrs)) // 206
    for name in names[:fit]:
        xattrs.put(fs.volume, many, name, b"", 0)
    with pytest.raises(SymError, match="bytes of attributes' names"):
        xattrs.put(fs.volume, many, names[fit], b"", 0)


def test_an_end_does_not_wait_for_ever_for_a_disk_that_hangs(
    pool: PagePool, facts: FakeFacts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = TroubledDisk(deadline_s=0.05)
    fs = FileSystem(pool, facts, tmp_path / "backing", 0, 0, trouble.disk)
    content = fs.volume.make_plain(fs.volume.tree.root, b"a", 0o600, 0, 0).content
    assert isinstance(content, PlainFile)
    content.write_at(0, b"text")
    trouble.stall("unlink")
    fs.close()
    trouble.go_on()
    assert "does not answer: backing files stay there" in caplog.text


def test_books_that_do_not_balance_are_an_error_of_one_line_that_says_where(fs: FileSystem) -> None:
    handle = fs.kv_create(ANN, None)
    append(fs, handle, 40)
    books = fs.audit()
    assert (books.num_free_pages, books.num_referenced_pages, books.num_references) == (14, 2, 2)
    fs.pool.refcount[handle.table.pages[1]] += 1
    with pytest.raises(SymError, match=r"the books do not balance: pages .* have .2. references") as caught:
        fs.audit()
    assert "\n" not in str(caught.value)
    assert caught.value.errno == errno.EIO
    fs.pool.refcount[handle.table.pages[1]] -= 1
