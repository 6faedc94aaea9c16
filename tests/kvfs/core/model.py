"""A model of the core in plain Python: lists by page number and by frame, and nothing that is quick."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

import numpy as np

from libsym.abi import PAGE_ENTRIES

ZEROS, SEVERAL = 0, -1
FREE_NAMES, NAME_PAGES = 128, 2
"""Names of files that cost nothing, and pages that each further one costs as much as."""
NONE = -1


class Refused(Exception):
    """Refusal of an operation for lack of room; it has changed nothing."""


@dataclass(eq=False)
class Account:
    """Counts of references, and a limit of pages that holds for it and what is below it."""

    number: int
    parent: Account | None = None
    most_pages: int | None = None
    most_files: int | None = None
    num_files: int = 0
    pages: Counter[int] = field(default_factory=Counter)

    def chain(self) -> list[Account]:
        return [self] if self.parent is None else [self, *self.parent.chain()]

    def require(self, num_new: int = 0, pages: list[int] | None = None, num_files: int = 0) -> None:
        for each in self.chain():
            new = num_new if pages is None else len({page for page in pages if not each.pages[page]})
            names = _names(each.num_files + num_files)
            is_more = new or names > _names(each.num_files)
            if is_more and each.most_pages is not None and len(each.pages) + new + names > each.most_pages:
                raise Refused
            if num_files and each.most_files is not None and each.num_files + num_files > each.most_files:
                raise Refused

    def charge(self, pages: list[int]) -> None:
        for each in self.chain():
            each.pages.update(pages)

    def refund(self, pages: list[int]) -> None:
        for each in self.chain():
            each.pages.subtract(pages)
            each.pages = +each.pages


@dataclass(eq=False)
class Room:
    """A reservation."""

    account: int
    num: int
    """Entries."""
    pages: list[int]
    """Pages from the file's first entry to its last reserved one."""
    new: list[int]
    stale: dict[int, bool]
    source: int = NONE
    copied: int = 0
    tail: int = NONE
    marked: int = NONE
    zeroed: int = 0
    """Pages, of `pages`, whose turn has come."""
    pinned: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    """A file's pages."""

    account: Account
    pages: list[int] = field(default_factory=list)
    length: int = 0
    row: int = NONE
    source: Table | None = None
    room: Room | None = None
    is_open: bool = True
    payer: Account | None = None
    """Account that is charged for the file; None: nobody is."""
    is_branch: bool = False
    is_odd: bool = False
    number: int = 0
    forked_from: int = 0
    fewest: int = 0
    changes: int = 0
    hits: int = 0
    heat: float = -inf
    used_s: float = 0.0

    def held(self) -> list[int]:
        return self.pages + (self.room.new if self.room else [])


class Model:
    """A pool."""

    def __init__(self, num: int, num_frames: int) -> None:
        self.refcount, self.pins, self.fill, self.num_reserved = ([0] * num for _ in range(4))
        self.num_on_disk, self.num_written, self.generation = ([0] * num for _ in range(3))
        self.has_digest = [False] * num
        self.row, self.frame, self.slot = ([NONE] * num for _ in range(3))
        self.kept_until = [0.0] * num
        self.tokens = [[0] * PAGE_ENTRIES for _ in range(num)]
        self.positions = [[0] * PAGE_ENTRIES for _ in range(num)]
        self.page_of, self.frame_generation = [NONE] * num_frames, [0] * num_frames
        self.bytes_in = [ZEROS] * num_frames
        self.free, self.free_frames = [True] * num, [True] * num_frames
        self.num_promised = self.low_water = 0
        self.is_awaited = False
        self.rung = False
        self.disowned: list[tuple[int, int]] = []
        self.next_number = 1
        self.num_branches = self.num_names = self.num_files = 0

    # ---- pages

    def allocate(
        self, count: int, account: Account, *, may_wait: bool, frames: list[int] | None = None
    ) -> tuple[list[int], list[bool]]:
        account.require(count)
        if count > sum(self.free):
            raise Refused
        has_frames = frames is not None or count <= sum(self.free_frames) - self.num_promised
        if not has_frames and not may_wait:
            raise Refused
        pages = _take(self.free, count)
        account.charge(pages)
        for page in pages:
            self.refcount[page], self.row[page], self.kept_until[page] = 1, NONE, 0.0
        if has_frames and frames is None:
            frames = _take(self.free_frames, count)
        stale = [False] * count if frames is None else self.bind(pages, frames, account.number)
        for page, is_stale in zip(pages, stale, strict=True):
            if is_stale or not has_frames:
                self.tokens[page], self.positions[page] = [0] * PAGE_ENTRIES, [0] * PAGE_ENTRIES
        self.rung |= sum(self.free_frames) - self.num_promised < self.low_water
        return pages, stale

    def bind(self, pages: list[int], frames: list[int], owner: int) -> list[bool]:
        found = []
        for page, frame in zip(pages, frames, strict=True):
            self.frame[page], self.page_of[frame] = frame, page
            found.append(self.bytes_in[frame] not in (ZEROS, owner + 1))
            self.bytes_in[frame] = SEVERAL if found[-1] else owner + 1
        return found

    def retain(self, pages: list[int], account: Account) -> None:
        account.require(pages=pages)
        account.charge(pages)
        for page in pages:
            self.refcount[page] += 1

    def release(self, pages: list[int], account: Account) -> None:
        account.refund(pages)
        for page in pages:
            self.refcount[page] -= 1
            if not self.refcount[page]:
                if self.slot[page] != NONE:
                    self.disowned.append((page, self.slot[page]))
                self.fill[page] = self.num_reserved[page] = self.num_on_disk[page] = self.num_written[page] = 0
                self.has_digest[page], self.slot[page], self.kept_until[page] = False, NONE, 0.0
                self.generation[page] += 1
                self.drop(page)
                self.free[page] = True
                self.rung |= self.is_awaited

    def drop(self, page: int) -> None:
        if (frame := self.frame[page]) != NONE:
            self.frame[page] = self.page_of[frame] = NONE
            self.frame_generation[frame] += 1
            self.free_frames[frame] = True

    def mix(self, page: int) -> None:
        if self.frame[page] != NONE:
            self.bytes_in[self.frame[page]] = SEVERAL

    def set_fill(self, page: int, fill: int, owner: int) -> None:
        self.fill[page], self.has_digest[page] = fill, False
        if self.frame[page] != NONE and self.bytes_in[self.frame[page]] != owner + 1:
            self.mix(page)

    # ---- tables

    def fork(self, table: Table, account: Account) -> Table:
        self.retain(table.pages, account)
        return Table(account, list(table.pages), table.length, source=table)

    def leave(self, table: Table, pages: list[int]) -> None:
        source = table.source.row if table.source is not None and table.source.is_open else NONE
        for page in pages:
            if table.row != NONE and self.row[page] == table.row:
                self.row[page] = source

    def truncate(self, table: Table, length: int) -> None:
        gone = table.pages[_pages_for(length) :]
        self.leave(table, gone)
        self.release(gone, table.account)
        table.pages, table.length = table.pages[: _pages_for(length)], length

    def close(self, table: Table) -> None:
        self.release(table.pages, table.account)
        table.is_open = False
        if table.payer is not None:
            self.charge_files(table.payer, -1)

    def change_owner(self, table: Table, account: Account) -> None:
        account.require(pages=table.held())
        account.charge(table.held())
        table.account.refund(table.held())
        table.account = account

    # ---- branches

    def charge_files(self, account: Account, num: int) -> None:
        self.num_files += num
        for each in account.chain():
            each.num_files += num

    def branch(self, source: Table, account: Account, *, has_row: bool) -> Table:
        is_named = _names(self.num_files + 1) != _names(self.num_files)
        if source.is_odd or not has_row or (is_named and not self.num_names):
            raise Refused
        account.require(pages=source.pages, num_files=1)
        branch = self.fork(source, account)
        branch.payer, branch.is_branch = account, True
        branch.number, branch.forked_from, branch.fewest = self.next_number, source.number, source.length
        self.next_number += 1
        self.num_branches += 1
        self.num_names -= is_named
        self.charge_files(account, 1)
        source.hits += 1
        return branch

    def cut(self, branch: Table, length: int) -> None:
        if not branch.is_branch or not 0 <= length <= branch.length:
            raise Refused
        if length != branch.length:
            self.truncate(branch, length)
            branch.changes += 1
            branch.fewest = min(branch.fewest, length)

    def end(self, branch: Table) -> None:
        if not branch.is_branch:
            raise Refused
        self.leave(branch, branch.pages)
        self.close(branch)
        self.num_branches -= 1

    def note_use(self, table: Table, now_s: float) -> None:
        """Note a use, at most once a second. A use adds 2^(minutes); the heat is the logarithm of the sum."""
        if not table.used_s or now_s - table.used_s >= 1:
            table.heat = float(np.logaddexp2(table.heat, now_s / 60))
            table.used_s = now_s

    # ---- reservations

    def reserve(self, table: Table, tokens: list[int], positions: list[int] | None, num_ahead: int) -> None:
        if positions is None:
            first = self._position(table.pages, table.length - 1) + 1
            positions = list(range(first, first + len(tokens)))
        tokens = tokens + num_ahead * [0]
        positions = positions + [positions[-1] + 1 + number for number in range(num_ahead)]
        owner, slot = table.account.number, table.length % PAGE_ENTRIES
        last = table.pages[-1] if slot else NONE
        copies = bool(slot) and self.fill[last] != slot and self.refcount[last] != 1
        num_new = _pages_for(table.length + len(tokens)) - len(table.pages) + copies
        new, stale = self.allocate(num_new, table.account, may_wait=True) if num_new else ([], [])
        room = Room(owner, len(tokens), table.pages + new, new, dict(zip(new, stale, strict=True)))
        room.zeroed = len(table.pages)
        if copies:
            target = new[0]
            room.pages, room.source = table.pages[:-1] + new, last
            room.copied = PAGE_ENTRIES if room.stale[target] else slot
            room.stale[target] = False
            for entries in (self.tokens, self.positions):
                entries[target][:slot] = entries[last][:slot]
            self.mix(target)
        elif slot:
            room.tail = room.marked = last
            self.num_on_disk[last] = min(self.num_on_disk[last], slot)
            self.num_written[last] = min(self.num_written[last], slot)
            self.num_reserved[last] = PAGE_ENTRIES - slot
        table.room = room
        self._write(table, table.length, tokens, positions)

    def _write(self, table: Table, first: int, tokens: list[int], positions: list[int]) -> None:
        assert table.room is not None
        for at, (token, position) in enumerate(zip(tokens, positions, strict=True), first):
            page, slot = table.room.pages[at // PAGE_ENTRIES], at % PAGE_ENTRIES
            self.tokens[page][slot], self.positions[page][slot] = token, position
            self.set_fill(page, slot + 1, table.account.number)

    def read(self, table: Table) -> list[list[int]]:
        """Return a file's tokens and positions."""
        places = [(table.pages[at // PAGE_ENTRIES], at % PAGE_ENTRIES) for at in range(table.length)]
        return [[entries[page][slot] for page, slot in places] for entries in (self.tokens, self.positions)]

    def _position(self, pages: list[int], entry: int) -> int:
        return -1 if entry < 0 else self.positions[pages[entry // PAGE_ENTRIES]][entry % PAGE_ENTRIES]

    def extend(self, table: Table, num: int) -> None:
        room = table.room
        assert room is not None
        first = table.length + room.num
        last = self._position(room.pages, first - 1)
        positions = [last + 1 + number for number in range(num)]
        num_new = _pages_for(first + len(positions)) - len(room.pages)
        new, stale = self.allocate(num_new, table.account, may_wait=False) if num_new else ([], [])
        if room.pinned:
            row = self.row[room.pages[-1]]
            for page in new:
                self.pins[page] += 1
                self.row[page] = row
            room.pinned += new
        room.pages, room.new = room.pages + new, room.new + new
        room.stale |= dict(zip(new, stale, strict=True))
        room.num += len(positions)
        self._write(table, first, [0] * len(positions), positions)

    def pin(self, table: Table) -> None:
        room = table.room
        assert room is not None
        room.pinned = room.pages + ([room.source] if room.source != NONE else [])
        for page in room.pinned:
            self.pins[page] += 1
            self.row[page] = table.row

    def unpin(self, table: Table) -> None:
        room = table.room
        assert room is not None
        if room.marked != NONE:
            self.num_reserved[room.marked] = 0
        for page in room.pinned:
            self.pins[page] -= 1
        self.rung |= self.is_awaited and bool(room.pinned)
        room.pinned = []

    def to_zero(self, table: Table, num: int) -> list[int]:
        room = table.room
        assert room is not None
        stop = _pages_for(table.length + num)
        due = [page for page in room.pages[room.zeroed : stop] if room.stale[page]]
        room.zeroed = max(room.zeroed, stop)
        return due

    def commit(self, table: Table, tokens: list[int]) -> None:
        room, start = table.room, table.length
        assert room is not None
        for at, token in enumerate(tokens, start):
            self.tokens[room.pages[at // PAGE_ENTRIES]][at % PAGE_ENTRIES] = token
        num_pages = _pages_for(start + len(tokens))
        taken = [page for page in room.pages[:num_pages] if page in room.new]
        if room.account == table.account.number:
            for page in taken:
                if room.stale[page]:
                    self.bytes_in[self.frame[page]] = room.account + 1
            source = self.frame[room.source] if room.source != NONE else NONE
            if source != NONE and self.bytes_in[source] == room.account + 1:
                self.bytes_in[self.frame[taken[0]]] = room.account + 1
        table.pages, table.length = room.pages[:num_pages], start + len(tokens)
        if room.source != NONE:
            if room.pinned:
                room.pinned.remove(room.source)
                self.pins[room.source] -= 1
                self.rung |= self.is_awaited
            self.leave(table, [room.source])
            self.release([room.source], table.account)
        room.source, room.num = NONE, room.num - len(tokens)
        room.new = [page for page in room.new if page not in taken]
        room.zeroed = max(room.zeroed, num_pages)
        room.tail = table.pages[-1] if table.length % PAGE_ENTRIES else NONE
        if not room.num:
            self.unpin(table)
            table.room = None

    def abort(self, table: Table) -> None:
        room = table.room
        assert room is not None
        self.unpin(table)
        if room.tail != NONE:
            self.set_fill(room.tail, table.length % PAGE_ENTRIES, table.account.number)
        self.release(room.new, table.account)
        table.room = None

    def forget_room(self, table: Table) -> None:
        room = table.room
        assert room is not None
        for page in room.new:
            self.drop(page)
            room.stale[page] = False

    def missing(self, table: Table) -> list[int]:
        """New pages without a frame, in the order in which they get one."""
        room = table.room
        assert room is not None
        return [page for page in room.new if self.frame[page] == NONE]

    def give_room(self, table: Table, frames: list[int]) -> None:
        room = table.room
        assert room is not None
        room.zeroed = len(table.pages)
        for page, frame in zip(self.missing(table), frames, strict=True):
            (room.stale[page],) = self.bind([page], [frame], room.account)
            if room.source != NONE and page == room.new[0]:
                room.copied = PAGE_ENTRIES if room.stale[page] else table.length % PAGE_ENTRIES
                room.stale[page] = False
                self.mix(page)


def _names(num_files: int) -> int:
    return NAME_PAGES * max(0, num_files - FREE_NAMES)


def _pages_for(length: int) -> int:
    return -(-length // PAGE_ENTRIES)


def _take(free: list[bool], count: int) -> list[int]:
    """The lowest run that fits, else the lowest ones."""
    for first in range(len(free) - count + 1):
        if count and all(free[first : first + count]):
            found = list(range(first, first + count))
            break
    else:
        found = [at for at, is_free in enumerate(free) if is_free][:count]
    for at in found:
        free[at] = False
    return found
