"""Random programs over tables, reservations, readers, images, extracts and merges agree with plain Python lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

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

NUM_PAGES = 14
MAX_POSITIONS = 300
COUNTS = st.sampled_from([1, 2, 3, 5, 7, 29, 31, 32, 33, 65])
CUTS = st.lists(st.floats(0, 1), min_size=2, max_size=6)
DOMAIN = FIRST_DOMAIN
OWNERS = st.sampled_from([1001, 1002, DOMAIN])
"""The domain belongs to 1001."""
MOST_PAGES = 10
"""Bytes that each uid may hold; the domain may hold half of them."""
FACTS = FakeFacts(layers=1, kv_heads=1, head_dim=2)


@dataclass
class File:
    """A table and what it must hold."""

    table: PageTable
    entries: list[Entry] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and positions that an open reservation will add."""

    def settle(self) -> None:
        """The pending entries are computed: each from the value before it."""
        for token, position in self.pending:
            before = self.entries[-1].value if self.entries else 0.0
            self.entries.append(Entry(token, position, entry_value(before, token, position)))
        self.pending = []


@dataclass
class Reader:
    snapshot: Snapshot
    image: bytes


def reference_image(entries: list[Entry], image_format: ImageFormat) -> bytes:
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
    snapshot = Snapshot(table, image_format)
    return bytes(snapshot.read(0, snapshot.size))


class Books(RuleBasedStateMachine):
    files = Bundle("files")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore(FACTS, NUM_PAGES)
        page_bytes = self.store.page_bytes
        self.accounts = Accounts(NUM_PAGES, page_bytes, AccountLimits(MOST_PAGES * page_bytes))
        limits = AccountLimits(MOST_PAGES // 2 * page_bytes)
        assert self.accounts.new_domain(self.accounts.of(1001), limits, lambda: "the domain").number == DOMAIN
        self.pool = PagePool(self.store, self.accounts)
        self.decoder = FakeDecoder(self.store)
        self.image_format = ImageFormat(FACTS)
        self.live: list[File] = []
        self.reading: list[Reader] = []
        self.assemblies: list[Assembly] = []
        self.serial = 0

    def new_entries(self, count: int, start: int) -> list[tuple[int, int]]:
        """Never the same twice, so that stale bytes can't pass for right ones."""
        self.serial += 1
        return [((self.serial * 37 + index) % 1000, start + index) for index in range(count)]

    def admit(self, file: File) -> File:
        self.live.append(file)
        return file

    def books(self) -> tuple[bytes, ...]:
        charged = b"".join(np.flatnonzero(account.pages.used).tobytes() for account in self.accounts)
        refcount, fill = self.pool.refcount[:NUM_PAGES], self.pool.fill[:NUM_PAGES]
        return (refcount.tobytes(), fill.tobytes(), self.pool._free.bitmap().tobytes(), charged)

    @rule(target=files, owner=OWNERS)
    def create(self, owner: int) -> File:
        return self.admit(File(PageTable(self.pool, owner)))

    @rule(file=files, count=COUNTS, position=st.integers(0, 50))
    def reserve(self, file: File, count: int, position: int) -> None:
        if file.pending or file.table.closed:
            return  # a bundle can't be asked for files without one
        pending, before = self.new_entries(count, position), self.books()
        try:
            reservation = file.table.reserve([token for token, _ in pending], [place for _, place in pending])
        except (NoSpace, OverQuota):
            assert self.books() == before
            return
        file.pending = pending
        assert reservation.start == len(file.entries)

    @rule(file=files)
    def commit(self, file: File) -> None:
        if file.pending:
            self.decoder.step(file.table.reservation)
            commit_all(file.table.reservation)
            file.settle()

    @rule(file=files, ran=st.booleans())
    def abort(self, file: File, *, ran: bool) -> None:
        if file.pending:
            if ran:
                self.decoder.step(file.table.reservation)
            file.table.reservation.abort()
            file.pending = []

    @rule(file=files, count=COUNTS)
    def append(self, file: File, count: int) -> None:
        self.reserve(file, count, len(file.entries))
        self.commit(file)

    @rule(target=files, file=files, owner=OWNERS)
    def fork(self, file: File, owner: int) -> File:
        if file.table.closed:
            return self.create(owner)
        before = self.books()
        try:
            fork = file.table.fork(owner)
        except OverQuota:
            assert self.books() == before
            return self.create(owner)
        return self.admit(File(fork, list(file.entries)))

    @rule(file=files, owner=OWNERS)
    def change_owner(self, file: File, owner: int) -> None:
        if file.table.closed:
            return
        before = self.books()
        try:
            file.table.change_owner(owner)
        except OverQuota:
            assert self.books() == before

    @rule(target=files, file=files, owner=OWNERS, mine=COUNTS, its=COUNTS, mine_first=st.booleans())
    def fork_and_diverge(self, file: File, owner: int, mine: int, its: int, *, mine_first: bool) -> File:
        fork = self.fork(file, owner)
        if mine_first:
            self.append(file, mine)
        self.append(fork, its)
        if not mine_first:
            self.append(file, mine)
        return fork

    @rule(
        target=files,
        file=files,
        cuts=st.lists(st.floats(0, 1), min_size=2, max_size=6),
        rebase=st.booleans(),
        owner=OWNERS,
    )
    def extract(self, file: File, cuts: list[float], *, rebase: bool, owner: int) -> File:
        """Ranges in any order, as long as they like; most begin or end in the middle of a page."""
        if file.table.closed:
            return self.create(owner)
        ends = [round(cut * len(file.entries)) for cut in cuts]
        ranges = [(min(pair), max(pair)) for pair in zip(ends[::2], ends[1::2], strict=False)]
        return self.assemble([file], [ranges], rebase=rebase, owner=owner)

    @rule(target=files, file=files, head=COUNTS, owner=OWNERS)
    def extract_a_prefix(self, file: File, head: int, owner: int) -> File:
        """Extract a prefix; since the positions stay, all of its pages are shared."""
        if file.table.closed or head > len(file.entries):
            return self.create(owner)
        free = self.pool.num_free
        made = self.assemble([file], [[(0, head)]], rebase=False, owner=owner)
        assert self.pool.num_free == free
        return made

    @rule(target=files, first=files, second=files, rebase=st.booleans(), owner=OWNERS)
    def merge(self, first: File, second: File, *, rebase: bool, owner: int) -> File:
        if first.table.closed or second.table.closed:
            return self.create(owner)
        whole = [[(0, len(file.entries))] for file in (first, second)]
        return self.assemble([first, second], whole, rebase=rebase, owner=owner)

    def assemble(self, files: list[File], ranges: list[list[tuple[int, int]]], *, rebase: bool, owner: int) -> File:
        entries = [e for file, own in zip(files, ranges, strict=True) for a, b in own for e in file.entries[a:b]]
        if rebase:
            entries = [entry.at(index) for index, entry in enumerate(entries)]
        pieces = [SourceRanges(file.table, np.array(own)) for file, own in zip(files, ranges, strict=True)]
        before = self.books()
        try:
            table = assemble(self.pool, owner, pieces, rebase=rebase, max_positions=MAX_POSITIONS)
        except (NoSpace, OverQuota, Invalid):
            assert self.books() == before
            return self.create(owner)
        assert table.owner == owner
        return self.admit(File(table, entries))

    @rule(target=files, file=files, grow=COUNTS, finish=st.booleans(), owner=OWNERS)
    def extract_from_a_changing_file(self, file: File, grow: int, *, finish: bool, owner: int) -> File:
        """The source is appended to, then cut to nothing, between any two moves; the books balance at each."""
        if file.table.closed or file.pending:
            return self.create(owner)
        entries = [entry.at(index) for index, entry in enumerate(file.entries[1:])]
        piece = SourceRanges(file.table, np.array([[1, max(len(file.entries), 1)]]))
        if not file.entries or len(entries) > MAX_POSITIONS:
            return self.create(owner)
        assembly = Assembly(self.pool, owner, [piece], rebase=True, max_positions=MAX_POSITIONS)
        self.assemblies.append(assembly)
        try:
            assembly.plan()
            self.append(file, grow)
            assembly.reserve()
            self.the_books_balance()
            self.truncate(file, 0.0)
            self.append(file, grow)
            assembly.fill()
            self.the_books_balance()
        except (NoSpace, OverQuota):
            finish = False
        self.assemblies.remove(assembly)
        if finish:
            return self.admit(File(assembly.finish(), entries))
        assembly.abandon()
        return self.create(owner)

    @rule(file=files, share=st.floats(0, 1))
    def truncate(self, file: File, share: float) -> None:
        if not file.pending and not file.table.closed:
            length = round(share * len(file.entries))
            file.table.truncate(length)
            del file.entries[length:]

    @rule(file=consumes(files))
    def close(self, file: File) -> None:
        if file.table.closed:
            return
        if file.pending:
            self.abort(file, ran=True)
        file.table.close()
        self.live.remove(file)

    @rule(target=readers, file=files)
    def open_reader(self, file: File) -> Reader:
        snapshot = Snapshot(file.table, self.image_format)
        reader = Reader(snapshot, reference_image(file.entries, self.image_format))
        self.reading.append(reader)
        return reader

    @rule(reader=readers, begin=st.floats(0, 1), size=st.integers(0, 20_000))
    def read(self, reader: Reader, begin: float, size: int) -> None:
        offset = round(begin * len(reader.image))
        assert bytes(reader.snapshot.read(offset, size)) == reader.image[offset : offset + size]

    @rule(reader=consumes(readers))
    def close_reader(self, reader: Reader) -> None:
        assert bytes(reader.snapshot.read(0, reader.snapshot.size)) == reader.image
        reader.snapshot.close()
        self.reading.remove(reader)

    @rule(target=files, file=files, owner=OWNERS)
    def import_copy(self, file: File, owner: int) -> File:
        before = self.books()
        source = BytesSource(reference_image(file.entries, self.image_format))
        try:
            table = import_image(self.pool, self.image_format, source, owner)
        except (NoSpace, OverQuota):
            assert self.books() == before
            return self.create(owner)
        return self.admit(File(table, list(file.entries)))

    @rule(file=files, owner=OWNERS)
    def abandon_import(self, file: File, owner: int) -> None:
        source = BytesSource(reference_image(file.entries, self.image_format))
        plan = parse_header(self.image_format, source)
        before = self.books()
        try:
            incoming = ImageImport(self.pool, plan, owner)
        except (NoSpace, OverQuota):
            assert self.books() == before
            return
        incoming.load(source)
        incoming.abandon()
        assert self.books() == before

    @invariant()
    def the_books_balance(self) -> None:
        sources = [source for assembly in self.assemblies for source in assembly.sources]
        tables = [file.table for file in self.live]
        self.pool.check(tables, sources, self.assemblies, [reader.snapshot for reader in self.reading])

    @invariant()
    def nobody_holds_more_than_he_may(self) -> None:
        for account in self.accounts:
            assert account.num_bytes <= account.limits.num_bytes

    @invariant()
    def every_file_holds_its_entries(self) -> None:
        for file in self.live:
            tokens, positions = file.table.read()
            values, moved = self.decoder.moved_entries(file.table.pages, file.table.length)
            held = zip(tokens.tolist(), positions.tolist(), values.tolist(), moved.tolist(), strict=True)
            assert [Entry(*entry) for entry in held] == file.entries

    def teardown(self) -> None:
        for reader in self.reading:
            reader.snapshot.close()
        for file in self.live:
            if file.pending:
                file.table.reservation.abort()
            file.table.close()
        self.pool.check()
        assert self.pool.num_free == NUM_PAGES


@pytest.mark.slow
class TestBooks(Books.TestCase):
    settings = settings(max_examples=150, stateful_step_count=50, deadline=None, database=None, derandomize=True)
