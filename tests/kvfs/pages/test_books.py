"""Random walks over tables, readers, images, extracts and merges: the bytes in the pages are those of plain lists."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvfs.images.format import ImageFormat
from kvfs.images.header import parse_header
from kvfs.images.importer import ImageImport
from kvfs.images.snapshot import Snapshot
from kvfs.pages.accounts import FIRST_DOMAIN, AccountLimits, Accounts
from kvfs.pages.assemble import Assembly, SourceRanges
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Invalid, NoSpace, OverQuota
from tests.kvfs.fakes import (
    BytesSource,
    Entry,
    FakeDecoder,
    FakeFacts,
    FakeStore,
    assemble,
    commit_all,
    entry_value,
    import_image,
)

NUM_PAGES, MAX_POSITIONS, MOST_FILES = 14, 300, 8
COUNTS = (1, 2, 3, 5, 7, 29, 31, 32, 33, 65)
OWNERS = (1001, 1002, FIRST_DOMAIN)
"""The domain belongs to 1001."""
MOST_PAGES = 10
"""Pages whose bytes each uid may hold; the domain may hold half of them."""
FACTS = FakeFacts(layers=1, kv_heads=1, head_dim=2)
FORMAT = ImageFormat(FACTS)


@dataclass(eq=False)
class File:
    """A table and what it must hold."""

    table: PageTable
    entries: list[Entry] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and positions of the open reservation."""

    def settle(self, num: int) -> None:
        """The first pending entries are computed: each from the value before it."""
        for token, position in self.pending[:num]:
            before = self.entries[-1].value if self.entries else 0.0
            self.entries.append(Entry(token, position, entry_value(before, token, position)))
        del self.pending[:num]


def reference_image(entries: list[Entry]) -> bytes:
    """The image of a file of these entries, written into a pool of its own by hand."""
    store = FakeStore(FACTS, NUM_PAGES)
    table = PageTable(PagePool(store), 1)
    if entries:
        reservation = table.reserve([entry.token for entry in entries], [entry.position for entry in entries])
        ramp = FakeDecoder(store).ramp
        for index, entry in enumerate(entries):
            slot = store.entries[reservation.pages[index // 32], :, :, :, index % 32]
            slot[:] = entry.value + ramp
            slot[:, 0] += entry.moved
        commit_all(reservation)
    snapshot = Snapshot(table, FORMAT)
    return bytes(snapshot.read(0, snapshot.size))


class Books:
    """A walk, by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = FakeStore(FACTS, NUM_PAGES)
        page_bytes = self.store.page_bytes
        accounts = Accounts(NUM_PAGES, page_bytes, AccountLimits(MOST_PAGES * page_bytes))
        accounts.new_domain(accounts.of(1001), AccountLimits(MOST_PAGES // 2 * page_bytes), lambda: "the domain")
        self.pool, self.decoder = PagePool(self.store, accounts), FakeDecoder(self.store)
        self.files: list[File] = []
        self.readers: list[tuple[Snapshot, bytes]] = []
        self.serial = self.num_refused = 0
        self.acts: dict[Callable[[], None], int] = {
            self.create: 3, self.reserve: 6, self.commit: 12, self.abort: 3, self.fork: 6, self.change_owner: 3,
            self.extract: 5, self.extract_a_prefix: 3, self.merge: 3, self.extract_from_a_changing_file: 3,
            self.truncate: 4, self.close: 6, self.open_reader: 3, self.read: 4, self.import_copy: 3,
            self.abandon_import: 2,
        }  # fmt: skip

    def run(self, num: int) -> None:
        for act in self.rng.choices(list(self.acts), list(self.acts.values()), k=num):
            act()
            self.check()
        while self.readers:
            self.close_reader()
        while self.files:
            self.close()
        assert self.pool.num_free == NUM_PAGES

    # ---- what there is

    def check(self, sources: Sequence[Any] = (), assemblies: Sequence[Any] = ()) -> None:
        tables = [file.table for file in self.files]
        self.pool.check(tables, sources, assemblies, [snapshot for snapshot, _ in self.readers])
        for account in self.pool.accounts:
            assert account.limits.num_bytes is None or account.num_bytes <= account.limits.num_bytes
        for file in self.files:
            tokens, positions = file.table.read()
            values, moved = self.decoder.moved_entries(file.table.pages, file.table.length)
            held = zip(tokens.tolist(), positions.tolist(), values.tolist(), moved.tolist(), strict=True)
            assert [Entry(*entry) for entry in held] == file.entries

    def books(self) -> tuple[bytes, ...]:
        charged = b"".join(np.flatnonzero(account.pages.used).tobytes() for account in self.pool.accounts)
        refcount, fill = self.pool.refcount[:NUM_PAGES], self.pool.fill[:NUM_PAGES]
        return (refcount.tobytes(), fill.tobytes(), self.pool._free.bitmap().tobytes(), charged)

    @contextmanager
    def if_there_is_room(self) -> Iterator[None]:
        """Refusals in this block must change nothing."""
        before = self.books()
        try:
            yield
        except (NoSpace, OverQuota, Invalid):
            self.num_refused += 1
            assert self.books() == before

    def file(self) -> File:
        if not self.files:
            self.create()
        return self.rng.choice(self.files)

    def owner(self) -> int:
        return self.rng.choice(OWNERS)

    def admit(self, table: PageTable, entries: list[Entry]) -> None:
        self.files.append(File(table, entries))
        if len(self.files) > MOST_FILES:
            self.close()

    # ---- what a walk does

    def create(self) -> None:
        self.admit(PageTable(self.pool, self.owner()), [])

    def reserve(self, file: File | None = None) -> None:
        """Reserve entries that were never the same before, so that stale bytes can't pass for right ones."""
        file, count, start = file or self.file(), self.rng.choice(COUNTS), self.rng.randint(0, 50)
        if not file.pending:
            self.serial += 1
            pending = [((self.serial * 37 + index) % 1000, start + index) for index in range(count)]
            with self.if_there_is_room():
                reservation = file.table.reserve([token for token, _ in pending], [place for _, place in pending])
                file.pending = pending
                assert reservation.start == len(file.entries)

    def commit(self, file: File | None = None) -> None:
        """Commit all entries, or some, and the others later."""
        file = file or self.file()
        if file.pending and (reservation := file.table.reservation):
            num = self.rng.choice([len(file.pending), self.rng.randint(1, len(file.pending))])
            self.decoder.step(reservation)
            reservation.commit_first(np.array([token for token, _ in file.pending[:num]], np.int32))
            file.settle(num)

    def append(self, file: File) -> None:
        self.reserve(file)
        self.commit(file)

    def abort(self, file: File | None = None) -> None:
        file = file or self.file()
        if reservation := file.table.reservation:
            if self.rng.random() < 0.5:
                self.decoder.step(reservation)
            reservation.abort()
            file.pending = []

    def fork(self) -> None:
        """Fork a file; then the one or the other may be the first at the frontier."""
        file = self.file()
        with self.if_there_is_room():
            fork = File(file.table.fork(self.owner()), list(file.entries))
            self.files.append(fork)
            for each in self.rng.sample([file, fork], self.rng.randint(0, 2)):
                self.append(each)

    def change_owner(self) -> None:
        with self.if_there_is_room():
            self.file().table.change_owner(self.owner())

    def assemble(self, files: list[File], ranges: list[list[tuple[int, int]]], *, rebase: bool) -> None:
        entries = [e for file, own in zip(files, ranges, strict=True) for a, b in own for e in file.entries[a:b]]
        if rebase:
            entries = [entry.at(index) for index, entry in enumerate(entries)]
        pieces = [SourceRanges(file.table, np.array(own)) for file, own in zip(files, ranges, strict=True)]
        with self.if_there_is_room():
            table = assemble(self.pool, owner := self.owner(), pieces, rebase=rebase, max_positions=MAX_POSITIONS)
            assert table.owner == owner
            self.admit(table, entries)

    def extract(self) -> None:
        """Ranges in any order, as long as they like; most begin or end in the middle of a page."""
        file = self.file()
        cuts = [sorted(self.rng.choices(range(len(file.entries) + 1), k=2)) for _ in range(self.rng.randint(1, 3))]
        self.assemble([file], [[(first, stop) for first, stop in cuts]], rebase=self.rng.random() < 0.5)

    def extract_a_prefix(self) -> None:
        """Extract a prefix; since the positions stay, all of its pages are shared."""
        file, free = self.file(), self.pool.num_free
        with self.if_there_is_room():
            piece = SourceRanges(file.table, np.array([(0, head := self.rng.randint(0, len(file.entries)))]))
            made = assemble(self.pool, self.owner(), [piece], rebase=False, max_positions=MAX_POSITIONS)
            assert self.pool.num_free == free
            self.admit(made, file.entries[:head])

    def merge(self) -> None:
        files = [self.file(), self.file()]
        self.assemble(files, [[(0, len(file.entries))] for file in files], rebase=self.rng.random() < 0.5)

    def extract_from_a_changing_file(self) -> None:
        """The source is appended to, then cut to nothing, between any two moves; the books balance at each."""
        file = self.file()
        if file.pending or not 0 < len(file.entries) <= MAX_POSITIONS:
            return
        entries = [entry.at(index) for index, entry in enumerate(file.entries[1:])]
        piece, owner = SourceRanges(file.table, np.array([[1, len(file.entries)]])), self.owner()
        try:
            assembly = Assembly(self.pool, owner, [piece], rebase=True, max_positions=MAX_POSITIONS)
        except OverQuota:
            return
        is_finished = False
        try:
            assembly.plan()
            self.append(file)
            assembly.reserve()
            self.check(assembly.sources, [assembly])
            self.abort(file)
            self.truncate(file, 0)
            self.append(file)
            assembly.fill()
            self.check(assembly.sources, [assembly])
            is_finished = self.rng.random() < 0.7
        except (NoSpace, OverQuota):
            self.num_refused += 1
        if is_finished:
            self.admit(assembly.finish(), entries)
        else:
            assembly.abandon()

    def truncate(self, file: File | None = None, length: int | None = None) -> None:
        file = file or self.file()
        if not file.pending:
            length = self.rng.randint(0, len(file.entries)) if length is None else length
            file.table.truncate(length)
            del file.entries[length:]

    def close(self) -> None:
        file = self.file()
        self.abort(file)
        file.table.close()
        self.files.remove(file)

    def open_reader(self) -> None:
        file = self.file()
        self.readers.append((Snapshot(file.table, FORMAT), reference_image(file.entries)))
        if len(self.readers) > 3:
            self.close_reader()

    def read(self) -> None:
        if self.readers:
            snapshot, image = self.rng.choice(self.readers)
            offset, size = self.rng.randint(0, len(image)), self.rng.randint(0, 20_000)
            assert bytes(snapshot.read(offset, size)) == image[offset : offset + size]

    def close_reader(self) -> None:
        snapshot, image = self.readers.pop(self.rng.randrange(len(self.readers)))
        assert bytes(snapshot.read(0, snapshot.size)) == image
        snapshot.close()

    def import_copy(self) -> None:
        file = self.file()
        source = BytesSource(reference_image(file.entries))
        with self.if_there_is_room():
            self.admit(import_image(self.pool, FORMAT, source, self.owner()), list(file.entries))

    def abandon_import(self) -> None:
        source = BytesSource(reference_image(self.file().entries))
        before = self.books()
        with self.if_there_is_room():
            incoming = ImageImport(self.pool, parse_header(FORMAT, source), self.owner())
            self.check([incoming])
            incoming.load(source)
            self.check([incoming])
            incoming.abandon()
            assert self.books() == before


@pytest.mark.parametrize("seed", range(4))
def test_files_hold_the_bytes_of_plain_lists_whatever_is_done_to_them(seed: int) -> None:
    books = Books(seed)
    books.run(700)
    assert books.num_refused > 30, "the walk never met a limit"
