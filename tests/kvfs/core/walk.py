"""Random operations on a pool and on its model: after each, every column, count and answer of the two is equal."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

import numpy as np

from kvfs._pages import ffi, lib
from kvfs.base.bell import Bell
from kvfs.pages.accounts import NAME_BYTES, AccountLimits, Accounts
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray, pointer
from kvfs.pages.holdings import WEIGHTS, Kind
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.residents import Residents
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace, OverQuota
from tests.kvfs.core.model import FREE_NAMES, NAME_PAGES, Account, Model, Refused, Table
from tests.kvfs.fakes import FakeFacts, FakeStore

NUM_NUMBERS, NUM_FRAMES = 26, 14
COUNTS = (1, 1, 1, 2, 3, 29, 31, 32, 33, 65, 100)
MOST_TABLES = 8
FACTS = FakeFacts(layers=1, kv_heads=1, head_dim=1)
SAME = ("refcount", "pins", "fill", "num_reserved", "has_digest", "row", "frame", "slot", "kept_until", "num_on_disk",
        "num_written", "generation")  # fmt: skip
SAME_OF_FILES = ("num_branches", "next_number", "num_names")
SAME_OF_FILE = ("number", "hits", "row", "used_s", "length", "is_branch")
SAME_OF_BRANCH = (*SAME_OF_FILE, "forked_from", "fewest", "changes")


class Ends:
    """Files on disk: what the pool tells of them."""

    def __init__(self) -> None:
        self.disowned: list[tuple[int, int]] = []

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        self.disowned += zip(pages.tolist(), slots.tolist(), strict=True)


class HeardBell(Bell):
    """A bell that tells whether it has rung."""

    def __init__(self) -> None:
        super().__init__()
        self.has_rung = False

    def ring(self) -> None:
        self.has_rung = True

    def heard(self) -> bool:
        has_rung, self.has_rung = self.has_rung, False
        return has_rung


@dataclass
class Reader:
    """A reader's pages, for the audit."""

    pages: IntArray
    owner: int

    def held_pages(self) -> IntArray:
        return self.pages

    def check(self) -> None:
        """Do nothing, in place of a check."""


class Walk:
    """A walk, by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ends = Ends()
        store = FakeStore(FACTS, NUM_FRAMES)
        accounts = Accounts(NUM_NUMBERS, store.page_bytes, AccountLimits(num_bytes=store.page_bytes * 18))
        self.pool = PagePool(store, accounts, num_on_disk=NUM_NUMBERS, slot_files=lambda: self.ends)
        self.pool.bell = self.bell = HeardBell()
        self.model = Model(NUM_NUMBERS, NUM_FRAMES)
        assert NAME_PAGES * store.page_bytes == NAME_BYTES
        ann, bob = Account(1001, most_pages=18), Account(1002, most_pages=18, most_files=(bobs_files := 4))
        limits = AccountLimits(num_bytes=store.page_bytes * 9, num_files=5)
        domain = accounts.new_domain(accounts.of(1001), limits, lambda: "a domain")
        self.accounts = [ann, bob, Account(domain.number, ann, 9, 5)]
        accounts.of(1002).holdings.limit_bytes = bobs_files * WEIGHTS[Kind.FILE] * 8 // 7 + 1
        accounts.of(1001).charge_files(FREE_NAMES - 3)
        self.model.charge_files(ann, FREE_NAMES - 3)
        self.tables: list[tuple[PageTable, Table]] = []
        self.branches: list[tuple[Any, Table]] = []
        """Branches that Python has no objects of."""
        self.files = ffi.new("core_files *", {"next_number": self.model.next_number})
        self.held: list[tuple[IntArray, Account]] = []
        """Pages that readers hold."""
        self.residents = Residents(self.pool)
        self.num_refused = self.num_slots = 0
        self.pool.core.low_water = self.model.low_water = 2
        self.told: set[int] = set()
        """Accounts whose watcher was told since the last look."""
        self.charged = [dict[int, int]() for _ in self.accounts]
        for account in self.accounts[::2]:
            accounts.of(account.number).watch(partial(self.told.add, account.number))
        self.acts: dict[Callable[[], None], int] = {
            self.new: 2, self.fork: 8, self.close: 5, self.truncate: 4, self.reserve: 16, self.extend: 4,
            self.commit: 14, self.abort: 4, self.pin: 10, self.unpin: 1, self.give_room: 6, self.forget_room: 2,
            self.to_zero: 8, self.change_owner: 2, self.hold: 2, self.let_go: 2, self.write: 6, self.drop: 6,
            self.bring: 6, self.set_digest: 2, self.promise: 1, self.fill: 3, self.check: 1, self.branch: 12,
            self.cut: 4, self.end: 6, self.see: 2, self.use: 2,
        }  # fmt: skip

    def run(self, num: int) -> None:
        for act in self.rng.choices(list(self.acts), list(self.acts.values()), k=num):
            act()
            self.compare()

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Do it with both, or neither has room."""
        try:
            expected = model()
        except Refused:
            self.num_refused += 1
            try:
                real()
            except (NoSpace, OverQuota):
                return None
            raise AssertionError("the core has room, and the model has none") from None
        return real(), expected

    def table(self, *, is_reserved: bool | None = None) -> tuple[Any, Any] | None:
        found = [each for each in self.tables if is_reserved is None or (each[1].room is not None) == is_reserved]
        return self.rng.choice(found) if found else None

    # ---- what a walk does

    def new(self) -> None:
        if len(self.tables) < MOST_TABLES:
            account = self.rng.choice(self.accounts)
            self._add(PageTable(self.pool, account.number), Table(account))

    def _add(self, table: PageTable, model: Table) -> None:
        if self.rng.random() < 0.8:
            model.row = self.residents.add(table)
        table.core.number = model.number = self.model.next_number
        self.files.next_number = self.model.next_number = model.number + 1
        table.core.is_odd = model.is_odd = self.rng.random() < 0.1
        self.tables.append((table, model))

    def fork(self) -> None:
        if (found := self.table()) is None or len(self.tables) >= MOST_TABLES:
            return
        table, model = found
        account = self.rng.choice([model.account, self.rng.choice(self.accounts)])
        forks = self.both(lambda: table.fork(account.number), lambda: self.model.fork(model, account))
        if forks is not None:
            self._add(*forks)

    def close(self) -> None:
        if (found := self.table(is_reserved=False)) is not None:
            self.tables.remove(found)
            if found[0].row != NOWHERE:
                self.residents.remove(found[0])
                self.model.leave(found[1], found[1].pages)
            found[0].close()
            self.model.close(found[1])
            if found[1].payer is not None:
                self.pool.accounts.of(found[1].payer.number).charge_files(-1)

    def truncate(self) -> None:
        if (found := self.table(is_reserved=False)) is not None:
            length = self.rng.randint(0, found[1].length)
            found[0].truncate(length)
            self.model.truncate(found[1], length)

    def every(self) -> list[tuple[Any, Table]]:
        """Return branches, too, by what the core has of each."""
        return [(table.core, model) for table, model in self.tables] + self.branches

    def any(self) -> tuple[Any, Table]:
        if not self.every():
            self.new()
        return self.rng.choice(self.every())

    def not_cold(self, outcome: int) -> None:
        self.pool.take_news()
        if outcome == lib.CORE_COLD:
            raise NoSpace("Python has to do it")
        assert outcome == lib.CORE_DONE

    def branch(self) -> None:
        """Make a branch; where the core has no row left, Python makes more."""
        (source, model), account, core = self.any(), self.rng.choice(self.accounts), self.pool.core
        maker = ffi.new("core_maker *", {"account": self.pool.accounts.of(account.number).core, "uid": 7})
        at, room = ffi.new("core_table **"), core.row_room
        self.files.num_names = self.model.num_names = self.rng.choice([0, 2, 2])
        core.row_room = self.rng.choice([room, room, core.num_rows])
        has_row = sum(each.row != NOWHERE for _, each in self.every()) < core.row_room
        done = self.both(
            lambda: self.not_cold(lib.core_branch(source, self.files, maker, 0o640, at)),
            lambda: self.model.branch(model, account, has_row=has_row),
        )
        core.row_room = room
        if done is not None:
            self.branches.append((at[0], done[1]))
            done[1].row = at[0].row
            for each in (done[1], model):
                self.model.note_use(each, at[0].used_s)

    def cut(self) -> None:
        """A branch, or another file, which the core leaves to Python."""
        core, model = self.any()
        length = self.rng.randint(-1, model.length + 1)
        self.both(lambda: self.not_cold(lib.core_branch_truncate(core, length)), lambda: self.model.cut(model, length))

    def end(self) -> None:
        core, model = self.any()
        done = self.both(lambda: self.not_cold(lib.core_branch_close(core, self.files)), lambda: self.model.end(model))
        if done is not None:
            self.branches.remove((core, model))

    def see(self) -> None:
        if self.branches and len(self.tables) < MOST_TABLES:
            core, model = self.branches.pop(self.rng.randrange(len(self.branches)))
            self.tables.append((PageTable(self.pool, model.account.number, core=core), model))
            self.residents.has(self.tables[-1][0])
            lib.core_branch_seen(core, self.files)
            model.is_branch = False
            self.model.num_branches -= 1

    def use(self) -> None:
        core, model = self.any()
        now_s = max(model.used_s, 1000.0) + self.rng.choice([-1, 0, 0.99, 1, 60, 10**7])
        lib.core_note_use(core, now_s)
        self.model.note_use(model, now_s)

    def reserve(self) -> None:
        if (found := self.table(is_reserved=False)) is None:
            return
        num = self.rng.choice(COUNTS)
        tokens, positions = self._entries(num), self.rng.choice([None, self._entries(num)])
        ahead = self.rng.choice([0, *COUNTS])
        self.both(
            lambda: found[0].reserve(tokens, positions, ahead),
            lambda: self.model.reserve(found[1], tokens, positions, ahead),
        )

    def _entries(self, num: int) -> list[int]:
        return [self.rng.randrange(1, 1000) for _ in range(num)]

    def extend(self) -> None:
        if (found := self.table(is_reserved=True)) is None:
            return
        num, reservation = self.rng.choice(COUNTS), found[0].reservation
        self.both(lambda: reservation.extend(num), lambda: self.model.extend(found[1], num))

    def to_zero(self) -> None:
        if (found := self.table(is_reserved=True)) is not None:
            self._zero(*found, self.rng.randint(1, found[1].room.num))

    def _zero(self, table: PageTable, model: Table, num: int) -> None:
        assert table.reservation is not None
        assert table.reservation.pages_to_zero(num) == self.model.to_zero(model, num)

    def commit(self) -> None:
        """Commit reserved entries, as far as their pages are in memory."""
        found = self.table(is_reserved=True)
        if found is None or self.model.missing(found[1]):
            return
        table, model = found
        num = self.rng.choice([model.room.num, self.rng.randint(1, model.room.num)])
        self._zero(table, model, num)
        tokens = self._entries(num)
        table.reservation.commit_first(np.array(tokens, np.int32))
        self.model.commit(model, tokens)

    def abort(self) -> None:
        if (found := self.table(is_reserved=True)) is not None:
            found[0].reservation.abort()
            self.model.abort(found[1])

    def pin(self) -> None:
        found = self.table(is_reserved=True)
        if found is None or found[1].room.pinned:
            return
        table, model = found
        needed = model.room.pages + ([model.room.source] if model.room.source != NOWHERE else [])
        if all(self.model.frame[page] != NOWHERE for page in needed):
            table.reservation.ready()
            self.model.pin(model)
            assert table.reservation.frames().tolist() == [self.model.frame[page] for page in model.room.pages]

    def unpin(self) -> None:
        if (found := self.table(is_reserved=True)) is not None:
            began_s, pages = time.monotonic(), found[0].reservation.pinned
            found[0].reservation.unpin()
            self.model.unpin(found[1])
            if pages is not None:
                assert (self.pool.last_use[pages] >= began_s).all()

    def forget_room(self) -> None:
        found = self.table(is_reserved=True)
        if found is not None and not found[1].room.pinned:
            found[0].reservation.forget_frames()
            self.model.forget_room(found[1])

    def give_room(self) -> None:
        if (found := self.table(is_reserved=True)) is None:
            return
        count = len(self.model.missing(found[1]))
        if 0 < count <= self.pool.store.free.count:
            frames = self._taken(count)
            found[0].reservation.give_frames(frames)
            self.pool.core.num_coming -= count
            self.model.give_room(found[1], frames.tolist())

    def _taken(self, count: int) -> IntArray:
        frames = self.pool.take_frames(count)
        for frame in frames.tolist():
            assert self.model.free_frames[frame]
            self.model.free_frames[frame] = False
        return frames

    def change_owner(self) -> None:
        if (found := self.table()) is not None:
            account = self.rng.choice(self.accounts)
            self.both(lambda: found[0].change_owner(account.number), lambda: self.model.change_owner(found[1], account))

    def hold(self) -> None:
        """Hold a table's pages for any account, as a reader does; or twice, as an image of equal pages does."""
        if (found := self.table()) is None:
            return
        pages, account = np.tile(found[0].pages, self.rng.choice([1, 2])), self.rng.choice(self.accounts)
        done = self.both(
            lambda: self.pool.retain(pages, account.number), lambda: self.model.retain(pages.tolist(), account)
        )
        if done is not None:
            self.held.append((pages, account))

    def let_go(self) -> None:
        """Give back at once what all readers of an account hold: pages are named several times."""
        if self.held:
            account = self.rng.choice(self.held)[1]
            pages = np.concatenate([pages for pages, other in self.held if other is account])
            self.held = [each for each in self.held if each[1] is not account]
            self.pool.release(pages, account.number)
            self.model.release(pages.tolist(), account)

    def fill(self) -> None:
        """Fill new pages, as an import does: it has its frames first, and overwrites all of them."""
        count, account = self.rng.randint(0, 3), self.rng.choice(self.accounts)
        if count > self.pool.store.free.count:
            return
        frames = self._taken(count)
        done = self.both(
            lambda: self.pool.allocate(count, account.number, frames),
            lambda: self.model.allocate(count, account, may_wait=False, frames=frames.tolist()),
        )
        if done is None:
            self.pool.return_frames(frames)
            for frame in frames.tolist():
                self.model.free_frames[frame], self.model.bytes_in[frame] = True, -1
        else:
            self.held.append((done[0], account))

    def check(self) -> None:
        branches = [Reader(np.array(model.pages, np.int32), model.account.number) for _, model in self.branches]
        readers = [Reader(pages, each.number) for pages, each in self.held]
        self.pool.check([table for table, _ in self.tables], readers, branches)

    # ---- what others do to pages

    def page(self) -> int | None:
        used = [page for page, count in enumerate(self.model.refcount) if count]
        return self.rng.choice(used) if used else None

    def write(self) -> None:
        """A page is on disk from now on, as far as it is computed, if nothing is computed into it."""
        page = self.page()
        if page is None or any(page in model.room.new for _, model in self.tables if model.room):
            return
        num = min(self.model.fill[page], PAGE_ENTRIES - self.model.num_reserved[page])
        self.num_slots += 1
        slot = self.num_slots if self.model.slot[page] == NOWHERE else self.model.slot[page]
        pages = np.array([page], np.int32)
        self.pool.on_disk.restore(pages, np.array([slot]), np.array([7], np.uint64), np.array([num], np.int8))
        self.model.slot[page], self.model.num_on_disk[page] = slot, num
        if self.rng.random() < 0.3:
            self.pool.on_disk.begin_write(pages, np.array([num], np.int8))
            self.model.num_written[page] = num
        if self.rng.random() < 0.3:
            self.pool.kept.extend(pages, until_s := float(self.rng.randrange(1, 4) * 10**9))
            self.model.kept_until[page] = max(self.model.kept_until[page], until_s)

    def drop(self) -> None:
        page = self.page()
        is_needed = any(page in model.room.new for _, model in self.tables if model.room)
        if page is not None and not self.model.pins[page] and not is_needed:
            self.pool.done(lib.core_give_frames(self.pool.core, pointer(np.array([page], np.int32)), 1))
            self.model.drop(page)

    def bring(self) -> None:
        page = self.page()
        is_new = any(page in model.room.new for _, model in self.tables if model.room)
        if page is None or is_new or self.model.frame[page] != NOWHERE or not self.pool.store.free.count:
            return
        frames, owner = self._taken(1), self.rng.choice(self.accounts)
        self.pool.end_bringing(np.array([page], np.int32), frames, owner.number)
        frame, is_sole = int(frames[0]), owner.pages[page] == self.model.refcount[page]
        self.model.frame[page], self.model.page_of[frame] = frame, page
        self.model.bytes_in[frame] = owner.number + 1 if is_sole else -1

    def set_digest(self) -> None:
        page = self.page()
        if page is not None and self.model.fill[page] == PAGE_ENTRIES:
            self.pool.keep_digests(np.array([page], np.int32), np.zeros((1, 32), np.uint8))
            self.model.has_digest[page] = True

    def promise(self) -> None:
        self.pool.core.num_promised = self.model.num_promised = self.rng.choice([0, 0, 3])
        self.pool.core.is_awaited = self.model.is_awaited = self.rng.random() < 0.5

    # ---- and what there is

    def compare(self) -> None:
        pool, model = self.pool, self.model
        for name in SAME:
            column, expected = pool._columns[name], getattr(model, name)
            found = column[:NUM_NUMBERS]
            assert found.tolist() == expected, f"{name} is {found.tolist()}, and should be {expected}"
        assert pool.tokens[:NUM_NUMBERS].tolist() == model.tokens
        assert pool.positions[:NUM_NUMBERS].tolist() == model.positions
        assert pool.store.page_of[:].tolist() == model.page_of
        assert pool.store.generation.tolist() == model.frame_generation
        assert pool.store.bytes_in.tolist() == model.bytes_in
        assert pool.num_free == sum(model.free)
        assert pool.store.free.count == sum(model.free_frames)
        assert self.bell.heard() == model.rung
        model.rung = False
        assert sorted(self.ends.disowned) == sorted(model.disowned)
        model.disowned.clear()
        self.ends.disowned.clear()
        for place, account in enumerate(self.accounts):
            pages = pool.accounts.of(account.number).pages
            core = pool.accounts.of(account.number).core
            assert core.num_tables == sum(each.account is account for _, each in self.every())
            assert (core.num_files, core.total.num_files) == (account.num_files, model.num_files)
            if place % 2 == 0 and self.charged[place] != account.pages:
                assert account.number in self.told
            self.charged[place] = dict(account.pages)
            assert {page: num for page, num in enumerate(pages.used.tolist()) if num} == account.pages
            assert core.page_bytes == len(account.pages) * pool.page_bytes
        self.told.clear()
        assert pool.num_shared == sum(count > 1 for count in model.refcount)
        assert pool.num_pinned == sum(count > 0 for count in model.pins)
        for table, expected in self.tables:
            assert [array.tolist() for array in table.read()] == model.read(expected)
            assert table.exclusive_pages == sum(model.refcount[page] == 1 for page in expected.pages)
            assert (table.pages.tolist(), table.length, table.owner) == (
                expected.pages, expected.length, expected.account.number,
            )  # fmt: skip
            if expected.room is not None:
                self._compare_room(table, expected)
        self._compare_files()

    def _compare_files(self) -> None:
        for name in SAME_OF_FILES:
            assert getattr(self.files, name) == getattr(self.model, name), name
        core, found = lib.core_next_branch(self.pool.core, ffi.NULL), set()
        while core:
            found.add(core)
            core = lib.core_next_branch(self.pool.core, core)
        assert found == {core for core, _ in self.branches}
        for core, expected in self.every():
            for name in SAME_OF_FILE if expected.payer is None else SAME_OF_BRANCH:
                assert getattr(core, name) == getattr(expected, name), name
            assert list(core.slots[0 : core.num_pages]) == expected.pages
            assert isclose(core.heat, expected.heat if expected.used_s else 0.0)
            if core.row != NOWHERE:
                assert self.pool.rows["num_users"][core.row] == (expected.payer is not None)

    @staticmethod
    def _compare_room(table: PageTable, expected: Table) -> None:
        reservation, room = table.reservation, expected.room
        assert reservation is not None
        assert room is not None
        assert reservation.pages.tolist() == room.pages
        assert sorted(reservation.needed()[table.core.num_pages :].tolist()) == sorted(room.new)
        assert (reservation.start, reservation.num_entries) == (expected.length, room.num)
        pinned = None if reservation.pinned is None else sorted(reservation.pinned.tolist())
        assert pinned == (sorted(room.pinned) or None)
        copies = reservation.copies
        assert [source for source, _ in copies] == ([room.source] if room.source != NOWHERE else [])
        if copies:
            assert table.core.num_copied == room.copied
