"""Random programs over tables, reservations, readers and images agree with plain Python lists at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvfs.accounts import FIRST_DOMAIN, Accounts, Limits
from kvfs.header import parse_header
from kvfs.image import ImageFormat
from kvfs.importer import ImageImport, import_image
from kvfs.pages import PagePool
from kvfs.snapshot import Snapshot
from kvfs.table import PageTable
from libsym.errors import NoSpace, OverQuota
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, entry_values

NUM_PAGES = 14
COUNTS = st.sampled_from([1, 2, 3, 5, 7, 29, 31, 32, 33, 65])
DOMAIN = FIRST_DOMAIN
OWNERS = st.sampled_from([1001, 1002, DOMAIN])
"""The domain belongs to 1001."""
MOST_PAGES = 10
"""That each uid may hold; the domain may hold half of them."""
FACTS = FakeFacts(layers=1, kv_heads=1, head_dim=2)


@dataclass
class File:
    """A table and what it must hold."""

    table: PageTable
    entries: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    """What an open reservation will add."""


@dataclass
class Reader:
    snapshot: Snapshot
    image: bytes


def reference_image(entries: list[tuple[int, int]], image_format: ImageFormat) -> bytes:
    """The image of a file made of these entries in one go, in a pool of its own."""
    store = FakeStore(FACTS, NUM_PAGES)
    table = PageTable(PagePool(store), 1)
    if entries:
        reservation = table.reserve([token for token, _ in entries], [position for _, position in entries])
        FakeDecoder(store).step(reservation)
        reservation.commit()
    snapshot = Snapshot(table, image_format)
    return bytes(snapshot.read(0, snapshot.size))


class Books(RuleBasedStateMachine):
    files = Bundle("files")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore(FACTS, NUM_PAGES)
        page_bytes = self.store.page_bytes
        self.accounts = Accounts(NUM_PAGES, page_bytes, Limits(MOST_PAGES * page_bytes))
        limits = Limits(MOST_PAGES // 2 * page_bytes)
        assert self.accounts.new_domain(self.accounts.of(1001), limits, lambda: "the domain").number == DOMAIN
        self.pool = PagePool(self.store, self.accounts)
        self.decoder = FakeDecoder(self.store)
        self.image_format = ImageFormat(FACTS)
        self.live: list[File] = []
        self.reading: list[Reader] = []
        self.serial = 0

    def new_entries(self, count: int, start: int) -> list[tuple[int, int]]:
        """Never the same twice, so that stale bytes can't pass for right ones."""
        self.serial += 1
        return [((self.serial * 37 + index) % 1000, start + index) for index in range(count)]

    def admit(self, file: File) -> File:
        self.live.append(file)
        return file

    def books(self) -> tuple[bytes, ...]:
        charged = b"".join(account.pages.all().tobytes() for account in self.accounts)
        return (self.pool.refcount.tobytes(), self.pool.fill.tobytes(), self.pool._free.bitmap().tobytes(), charged)

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
            file.table.reservation.commit()
            file.entries, file.pending = file.entries + file.pending, []

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
        self.pool.check([file.table for file in self.live], [reader.snapshot for reader in self.reading])

    @invariant()
    def nobody_holds_more_than_he_may(self) -> None:
        for account in self.accounts:
            assert account.num_bytes <= account.limits.num_bytes

    @invariant()
    def every_file_holds_its_entries(self) -> None:
        for file in self.live:
            tokens, positions = file.table.read()
            assert list(zip(tokens.tolist(), positions.tolist(), strict=True)) == file.entries
            values = self.decoder.entries(file.table.pages, len(file.table))
            assert values.tolist() == entry_values(file.entries)

    def teardown(self) -> None:
        for reader in self.reading:
            reader.snapshot.close()
        for file in self.live:
            if file.pending:
                file.table.reservation.abort()
            file.table.close()
        self.pool.check()
        assert self.pool.num_free == NUM_PAGES


class TestBooks(Books.TestCase):
    settings = settings(max_examples=150, stateful_step_count=50, deadline=None, database=None, derandomize=True)
