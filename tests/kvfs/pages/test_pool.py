"""The pool: what it refuses, what its audit finds, and the memory that it takes. Walks: core/test_core.py."""

import hashlib
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from kvfs.pages.columns import Columns
from kvfs.pages.digest import digest
from kvfs.pages.pool import NO_ARENA, PagePool
from kvfs.pages.table import PageTable
from libsym.errors import NoSpace
from tests.kvfs.fakes import FakeStore, commit_all

ANN, BOB = 1001, 1002
MARKER = b"the secret of ann"


class Held:
    """A holder of pages, for the check of the books."""

    owner = ANN

    def __init__(self, *pages: int) -> None:
        self.pages = np.array(pages, np.int32)

    def held_pages(self):
        return self.pages

    def check(self) -> None:
        pass


def test_what_the_pool_has_not_or_has_back_already_is_refused_in_words(pool: PagePool) -> None:
    pages = pool.allocate(10, ANN)
    with pytest.raises(NoSpace, match="7 pages wanted, 6 of 16 free"):
        pool.allocate(7, ANN)
    pool.check([Held(*pages)])
    pool.release(pages, ANN)
    with pytest.raises(AssertionError, match="too often"):
        pool.release(pages[:1], ANN)


def test_a_digest_is_that_of_the_bytes_and_lives_until_the_page_is_freed(pool: PagePool, store: FakeStore) -> None:
    pages = pool.allocate(2, ANN)
    pool.fill[pages] = 32
    store.writable(int(pages[1]))[: len(MARKER)] = MARKER
    expected = b"".join(hashlib.blake2b(store.view(page), digest_size=32).digest() for page in pages.tolist())
    assert pool.digests_of(pages) == expected
    # Nobody does this to a full page: it shows the cache.
    store.writable(int(pages[0]))[:] = bytes([9]) * store.page_bytes
    assert pool.digests_of(pages) == expected
    pool.release(pages, ANN)
    again = pool.allocate(2, ANN)
    assert pool.digests_of(again)[:32] == digest(bytes([9]) * store.page_bytes)


def test_the_check_finds_references_that_nobody_accounts_for(pool: PagePool):
    assert pool.allocate(2, ANN).tolist() == [0, 1]
    pool.check([Held(0)], [Held(1)])
    for held in ([], [0], [0, 1, 2], [0, 0, 1]):
        with pytest.raises(AssertionError, match="references"):
            pool.check([Held(*held)])


@pytest.mark.parametrize(
    ("column", "pages", "value"),
    [
        ("fill", 3, 5),
        ("fill", 2, 33),
        ("has_digest", 2, True),
        ("num_reserved", 3, 2),
        ("on_disk.slot", 3, 0),
        ("on_disk.slot", [1, 2], 7),
        ("on_disk.kept", 2, 1),
        ("on_disk.is_suspect", 2, True),
    ],
)
def test_the_check_finds_a_page_that_contradicts_itself(pool: PagePool, column: str, pages: object, value: int):
    pool.release(pool.allocate(4, ANN)[3:], ANN)  # the check looks at pages that were ever used
    held = Held(0, 1, 2)
    pool.check([held])
    attrgetter(column)(pool)[pages] = value
    with pytest.raises(AssertionError, match=r"\[.*\] contradict themselves"):
        pool.check([held])


def test_a_number_that_was_given_out_anew_before_a_sync_failed_is_of_no_concern_to_it(pool: PagePool):
    pages = pool.allocate(2, ANN)
    fills = pool.fill[pages[:1]]
    generations = pool.on_disk.begin_write(pages[:1], fills)
    slots = np.array([7], np.int32)
    assert pool.on_disk.end_write(pages[:1], generations, fills, slots, np.zeros(1, np.uint64)).all()
    pool.on_disk.spoil(pages, np.zeros(2, np.bool_))
    assert pool.on_disk.is_suspect[pages].tolist() == [True, False]
    pool.check([Held(*pages)])


def test_the_check_finds_a_page_of_another_arena(pool: PagePool):
    table = PageTable(pool, ANN)
    commit_all(table.reserve([1], [0]))
    pool.check([table])
    table.arena = NO_ARENA
    with pytest.raises(AssertionError, match=r"pages \[0\] of a file of arena 255 are of arenas \[0\]"):
        pool.check([table])


def test_ten_million_numbers_that_nobody_has_used_take_no_memory():
    """The test runs in a process of its own: memory that others have freed would hide the pages' memory."""
    script = """if True:
        from kvfs.pages.pool import PagePool
        from tests.kvfs.fakes import FakeFacts, FakeStore

        def resident_bytes():
            return 4096 * int(open("/proc/self/statm").read().split()[1])

        store = FakeStore(FakeFacts(), 16)
        PagePool(store)
        before = resident_bytes()
        pool = PagePool(store, num_on_disk=10_000_000)
        pool.release(pool.allocate(16, 1), 1)
        pool.check()
        print(resident_bytes() - before)
    """
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert int(ran.stdout) < 64_000_000


def test_the_check_finds_numbers_of_shared_and_pinned_pages_that_are_wrong(pool: PagePool):
    pages = pool.allocate(3, ANN)
    pool.retain(pages[:2], ANN)
    pool.pin(pages[1:])
    assert (pool.num_shared, pool.num_pinned) == (2, 2)
    pool.pins[pages[0]] = 1
    with pytest.raises(AssertionError, match="2 pages are said to be pinned, 3 are"):
        pool.check([Held(*pages), Held(*pages[:2])])
    pool.pins[pages[0]] = 0
    pool.unpin(pages[1:])
    pool.release(pages[:2], ANN)
    assert (pool.num_shared, pool.num_pinned) == (0, 0)
    pool.check([Held(*pages)])


def num_writable() -> int:
    """Bytes of private memory that may be written."""
    found = re.findall(r"^(\w+)-(\w+) rw.p", Path("/proc/self/maps").read_text(encoding="utf-8"), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in found)


def test_only_numbers_that_there_are_count_where_the_kernel_does_not_overcommit():
    """The kernel counts what may be written: a pool of ten numbers is some pages of memory, whatever is reserved."""
    num_before = num_writable()
    columns = Columns("page_columns", 10, 1 << 28)
    assert num_writable() - num_before < 1 << 20
    columns["tokens"][9, 31] = 5
    assert columns["tokens"][1 << 20, 0] == 0


def test_columns_grow_within_the_address_space_that_they_reserved_and_that_the_kernel_gives():
    columns = Columns("frame_columns", 10, 1024)
    columns.grow(1024)
    with pytest.raises(MemoryError, match="1024 are reserved"):
        columns.grow(1025)
    with pytest.raises(MemoryError, match="address space"):
        Columns("page_columns", 1, 1 << 40)
