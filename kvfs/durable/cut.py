"""A cut: the changes that one commit makes durable, taken at one instant, on the trio thread without an await.

`Known` describes an inode as the index has it. The `Known` of an inode is replaced when a commit has succeeded. The
slots in the cut's new rows count as needed as soon as the cut is taken. Slots that only the replaced rows name stay
needed until the commit is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvfs.durable.index import Rows
from kvfs.durable.journal import Journal, NameChange, entries_needed, is_awaited, is_gone
from kvfs.durable.records import (
    ENTRY_BYTES,
    SlotRecord,
    VersionRecord,
    encode_inode,
    encode_version,
    encode_xattrs,
    name_check,
    signed,
    slot_check,
)
from kvfs.durable.restore import record_of
from kvfs.durable.slots import Slots
from kvfs.durable.sums import SumsCutter, SumsTaken
from kvfs.names.content import OWN, Content, KvFile, marks_within
from kvfs.names.inode import Inode, NamePut, Xattrs
from kvfs.names.plain import PlainFile, backing_name
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool, pages_for
from kvfs.pages.turns import turns_within
from libsym.abi import PAGE_ENTRIES

NO_SLOTS: IntArray = np.empty(0, np.int32)
NO_BYTES = -1
"""Number that stands for no backing file."""


class Known(NamedTuple):
    """An inode as the index has it."""

    num_names: int
    backing: int = NO_BYTES
    kv: KvFile | None = None
    """The version whose entries the index has."""
    length: int = 0
    full_length: int = 0
    identity: int = 0
    slots: IntArray = NO_SLOTS
    turns: bytes = b""


@dataclass(slots=True)
class Cut:
    """The rows that a commit writes, and the facts that the end of the commit needs."""

    rows: Rows = field(default_factory=Rows)
    changes: list[NameChange] = field(default_factory=list)
    inodes: dict[Inode, int] = field(default_factory=dict)
    """Dirty inodes that the cut has taken from the journal."""
    known: dict[int, Known | None] = field(default_factory=dict)
    """Inodes as the index will have them after this commit, by number. None: the index will have no row of the inode.
    """
    versions: list[KvFile] = field(default_factory=list)
    """KV files whose entries are in the cut."""
    new_slots: list[tuple[int, IntArray]] = field(default_factory=list)
    """Slots that the cut's rows need, by identity."""
    old_slots: list[tuple[int, IntArray]] = field(default_factory=list)
    """Slots of the rows that this commit replaces."""
    xattrs: list[tuple[Xattrs, int | None]] = field(default_factory=list)
    """Attributes whose own row the cut writes, each with its `changes` at the time of the cut. None: the cut removes
    the row.
    """
    sums: SumsTaken = field(default_factory=list)
    """Checksums of plain files in the cut."""
    new_backing: list[str] = field(default_factory=list)
    """Backing files that a row of the cut names for the first time."""
    gone_backing: list[str] = field(default_factory=list)
    """Backing files that no row names after the cut."""
    number: int = 0
    """Serial number of the last change before the cut."""

    @property
    def is_empty(self) -> bool:
        return not self.rows.count


def extent_of(content: Content | None) -> int:
    """Return the extent that a sync of this content has to reach: a number of entries, or a plain file's `changes`."""
    if isinstance(content, PlainFile):
        return content.changes
    return content.table.length if isinstance(content, KvFile) else 0


class Cutter:
    """Takes the cuts of one tree. Owned by the trio thread."""

    def __init__(
        self,
        pool: PagePool,
        journal: Journal,
        slots: dict[int, Slots],
        own: int,
        bits: str,
        left_out: Callable[[Inode, Exception], None],
    ) -> None:
        """`slots` has the slots of each identity. `own` is the identity of the running model. `bits` is the mark of the
        entries that this model computes.

        `left_out` is called with each inode that a commit could not write, and the error.
        """
        self._pool = pool
        self._journal = journal
        self._slots = slots
        self._own = own
        self._bits = bits
        self._gone_slots: list[tuple[int, int]] = []  # slots whose rows the next commit removes
        self.known: dict[int, Known] = {}
        self._kept_next_inode = 0
        self.sums = SumsCutter()
        self.named_elsewhere: set[int] = set()
        """Inodes whose rows stay even if the tree has no name for them, because damaged rows of names also lead to
        these inodes.
        """
        self._left_out = left_out

    def durable_length(self, kv: KvFile) -> int:
        """Return how many of the file's first entries are in slots."""
        return self._pool.on_disk.durable_length(kv.table.pages, kv.table.length)

    def is_ready(self, put: NamePut) -> bool:
        """Return whether a put may be committed: its file can be written, and the entries that the file had at the time
        of the put are on disk. The first sync of a new plain file is over.
        """
        if put.after in self._journal.left_out or is_awaited(put.after):
            return False
        needed = entries_needed(put)
        if not needed:
            return True
        assert put.after is not None
        kv = put.after.content
        assert isinstance(kv, KvFile)
        return self.durable_length(kv) >= needed

    def unready(self, changes: Iterable[NameChange]) -> list[KvFile | PlainFile]:
        """Return the files whose entries or bytes hold up these operations."""
        puts = [put for change in changes for put in change.puts if not self.is_ready(put)]
        contents = [put.after.content for put in puts if put.after is not None]
        return [each for each in contents if isinstance(each, KvFile | PlainFile)]

    def _are_ready(self, changes: Iterable[NameChange]) -> bool:
        return all(self.is_ready(put) for change in changes for put in change.puts)

    def holding_up(self, inode: Inode) -> list[KvFile | PlainFile]:
        """Return files whose entries or bytes must be on disk before all names of an inode can be committed. If many
        files hold up the inode, return some of them.
        """
        first = {change.number for change in self._journal.prefix(self.is_ready, self._journal.a_cut)}
        return self.unready(self._journal.closure([inode], first, self._journal.a_slice))

    def take(
        self,
        wanted: Iterable[Inode],
        next_inode: int,
        num_others: int = 0,
        *,
        is_slice: bool = False,
        is_apart: bool = False,
    ) -> Cut:
        """Take a cut of the wanted inodes, the operations that their names depend on, the oldest operations, and other
        dirty inodes.

        All wanted inodes together get one slice of operations. If many inodes are wanted, the last of them may need
        another cut. `is_slice`: take a whole slice of the oldest operations, more than an ordinary cut takes.
        `is_apart`: ready operations do not wait for earlier operations that are not ready.

        An inode that can't be written is left out with all names that lead to it, and the cut is taken anew.
        """
        wanted = [inode for inode in wanted if inode.names or inode.parent is not None]
        left_out = self._journal.left_out
        for inode in [each for each in left_out if is_gone(each)]:
            del left_out[inode]
        num_first = self._journal.a_slice if is_slice else self._journal.a_cut
        while True:
            cut, unwritable = self._take(wanted, num_others, num_first, is_apart=is_apart)
            if not unwritable:
                break
            self.failed(cut)
            self.leave_out(unwritable)
        self.sums.take_asked(cut.rows, cut.sums, lambda content: self._knows_bytes(cut, content))
        for identity, slots in _by_identity(cut.new_slots):
            self._slots[identity].need(slots)
        cut.rows.gone_slots, self._gone_slots = self._gone_slots, []
        gone = self._journal.gone_xattrs
        forgotten = [each for each in gone if cut.known.get(each, self.known.get(each)) is None]
        gone.difference_update(forgotten)
        cut.rows.gone_xattrs += [(each,) for each in forgotten if each not in self.named_elsewhere]
        if next_inode != self._kept_next_inode and cut.rows.count:
            cut.rows.next_inode = next_inode
        return cut

    def _take(
        self, wanted: list[Inode], num_others: int, num_first: int, *, is_apart: bool
    ) -> tuple[Cut, dict[Inode, Exception]]:
        """Take a cut, without marking its slots as needed. Return the cut, and the inodes that could not be written."""
        left_out = self._journal.left_out
        cut = Cut(number=self._journal.number)
        if is_apart or left_out:
            prefix = self._journal.apart(self.is_ready, num_first)
        else:
            prefix = self._journal.prefix(self.is_ready, num_first)
            self._journal.end_pass()
        cut.changes = self._with_closures(prefix, wanted)
        touched = self._take_names(cut)
        dirty = self._journal.dirty
        bounded = {put.after for change in cut.changes for put in change.puts if put.is_of_domain}
        others = self._journal.others(lambda each: self._gains(cut, each), num_others)
        gone = [each for each in others if is_gone(each)]
        written = [
            inode
            for inode in dict.fromkeys([*touched, *wanted, *self._journal.directories_above(wanted), *others])
            if inode not in left_out
            and not is_awaited(inode)
            and self._is_named(cut, inode)
            and (inode in dirty or inode in bounded or not self._known(inode).num_names)
        ]
        cut.inodes = self._journal.take(cut.changes, {*written, *gone})
        return cut, self._write_all(cut, written)

    def _write_all(self, cut: Cut, inodes: Iterable[Inode]) -> dict[Inode, Exception]:
        """Put the rows of inodes into the cut. Return the inodes that can't be written, each with the error."""
        unwritable: dict[Inode, Exception] = {}
        for inode in inodes:
            try:
                self._write(cut, inode)
            except Exception as error:  # noqa: BLE001 - any error concerns this inode alone
                unwritable[inode] = error
        return unwritable

    def leave_out(self, unwritable: dict[Inode, Exception]) -> None:
        """Leave inodes out of commits, so that other changes can be committed."""
        for inode, error in unwritable.items():
            self._journal.left_out[inode] = repr(error)
            self._left_out(inode, error)

    def try_again(self, inodes: Iterable[Inode]) -> None:
        """Try to write inodes that were left out. Inodes that can be written now take part in commits again."""
        left_out, trial = self._journal.left_out, Cut()
        tried = [inode for inode in inodes if inode in left_out]
        unwritable = self._write_all(trial, (inode for inode in tried if not is_gone(inode)))
        self.failed(trial)
        for inode in tried:
            if inode not in unwritable:
                del left_out[inode]

    def left_out(self, wanted: Inode | None = None) -> Inode | None:
        """Return an inode that commits leave out, or None. With `wanted`, consider only that inode and the inodes that
        its names wait for.
        """
        found = self._journal.left_out
        if wanted is None:
            return next((each for each in found if not is_gone(each)), None)
        if not found:
            return None
        puts = (put for change in self._journal.closure([wanted], most=self._journal.a_slice) for put in change.puts)
        return next((each for each in (wanted, *(put.after for put in puts)) if each in found), None)

    def forget_slots(self, identity: int, slots: IntArray) -> None:
        """Have the next commit remove the rows of these slots, which are free now."""
        rows = self._slots[identity].recorded.intersection(slots.tolist())
        self._slots[identity].recorded -= rows
        self._gone_slots += [(identity, slot) for slot in rows]

    def _with_closures(self, prefix: list[NameChange], wanted: list[Inode]) -> list[NameChange]:
        """Return `prefix` and the closures of wanted inodes. A closure that is not ready, or too long for the cut, is
        left out.
        """
        taken = {change.number: change for change in prefix}
        room = self._journal.a_slice
        for inode in wanted:
            if room <= 0 or len(taken) == len(self._journal.operations):
                break
            closure = self._journal.closure([inode], taken, room)
            if len(closure) <= room and self._are_ready(closure):
                taken |= {change.number: change for change in closure}
            room -= len(closure)
        return [taken[number] for number in sorted(taken)]

    def _take_names(self, cut: Cut) -> list[Inode]:
        """Put the rows of names into the cut. Return the inodes that the operations concern."""
        final: dict[tuple[int, bytes], Inode | None] = {}
        counts: dict[Inode, int] = {}
        for change in cut.changes:
            for put in change.puts:
                if not put.is_of_domain:
                    final[put.key] = put.after
                for inode, step in ((put.after, 1), (put.before, -1)):
                    if inode is not None:
                        counts[inode] = counts.get(inode, 0) + step
        for (directory, name), after in final.items():
            if after is None:
                cut.rows.gone_names.append((directory, name))
            else:
                check = name_check(directory, name, after.number)
                cut.rows.names.append((directory, name, after.number, check))
        for inode, step in counts.items():
            known = self._known(inode)
            num_names = known.num_names + step
            assert num_names >= 0, f"inode {inode.number} would have {num_names} names in the index"
            if num_names:
                cut.known[inode.number] = known._replace(num_names=num_names)
            elif known.num_names:
                self._forget(cut, inode, known)
        return list(counts)

    def _forget(self, cut: Cut, inode: Inode, known: Known) -> None:
        cut.known[inode.number] = None
        if inode.number in self.named_elsewhere:
            return
        cut.rows.gone_inodes.append((inode.number,))
        self._drop_content(cut, inode.number, known)

    def _drop_content(self, cut: Cut, number: int, known: Known) -> None:
        if known.kv is not None:
            cut.rows.gone_versions.append((number,))
            cut.old_slots.append((known.identity, known.slots))
        if known.backing != NO_BYTES:
            self._drop_backing(cut, number, known.backing)

    def _drop_backing(self, cut: Cut, number: int, backing: int) -> None:
        cut.gone_backing.append(backing_name(number, backing))
        cut.rows.gone_sums.append((number, 0))

    def _is_named(self, cut: Cut, inode: Inode) -> bool:
        """Whether the inode has a name after this cut. The root needs no name."""
        known = cut.known.get(inode.number, self._known(inode))
        return known is not None and (bool(known.num_names) or inode.parent is inode)

    def _gains(self, cut: Cut, inode: Inode) -> bool:
        """Whether a commit of a dirty inode would add anything to the index, or would forget the inode. On a
        full disk many dirty inodes only wait until their entries are on disk.
        """
        if is_awaited(inode):
            return False  # nor is it forgotten without a name, because the write-back has to free the memory
        if is_gone(inode):
            return True
        if inode not in self._journal.waiting:
            return self._is_named(cut, inode)
        content, known = inode.content, self._known(inode)
        if isinstance(content, KvFile):
            return known.kv is not content or self.durable_length(content) > known.length
        return not isinstance(content, PlainFile) or not content.is_dirty

    def _knows_bytes(self, cut: Cut, content: PlainFile) -> bool:
        """Whether the index has a row that names the backing file after this cut."""
        number = content.inode
        known = cut.known.get(number, self.known.get(number))
        return number in self.named_elsewhere or (known is not None and known.backing == content.number)

    def _known(self, inode: Inode) -> Known:
        return self.known.get(inode.number, _UNKNOWN)

    def _write(self, cut: Cut, inode: Inode) -> None:
        """Put the inode's row into the cut. If the index has other entries than the file, put the version's row into
        the cut, too.
        """
        number, content = inode.number, inode.content
        old = cut.known.get(number) or self._known(inode)
        new = old
        if isinstance(content, PlainFile):
            backing = content.number if content.exists else NO_BYTES
            if old.kv is not None or backing != old.backing:
                self._drop_content(cut, number, old)
                if backing != NO_BYTES:
                    cut.new_backing.append(content.name)
            new = Known(old.num_names, backing)
            if backing != NO_BYTES:
                self.sums.take(cut.rows, cut.sums, content)
        elif isinstance(content, KvFile) and self._may_show(content, old):
            new = self._version(cut, number, content, old)
        cut.known[number] = new
        self._write_xattrs(cut, inode)
        record = record_of(inode, new.backing, self._journal.limits_of(inode), has_entries=new.kv is not None)
        cut.rows.inodes.append((number, encode_inode(number, record)))

    def _write_xattrs(self, cut: Cut, inode: Inode) -> None:
        """If large attributes changed, put their own row into the cut. If attributes are no longer large, put the
        removal of that row into the cut.
        """
        xattrs, number = inode.xattrs, inode.number
        if xattrs.are_large and xattrs.kept != xattrs.changes:
            cut.rows.xattrs.append((number, encode_xattrs(number, xattrs)))
            cut.xattrs.append((xattrs, xattrs.changes))
            xattrs.kept = -1 if xattrs.kept is None else xattrs.kept  # from now on the index may have a row
        elif not xattrs.are_large and xattrs.kept is not None:
            cut.rows.gone_xattrs.append((number,))
            cut.xattrs.append((xattrs, None))

    def _may_show(self, kv: KvFile, old: Known) -> bool:
        """Whether the index may have the version. A new version enters the index only with all entries that it began
        with.
        """
        return old.kv is kv or self.durable_length(kv) >= min(kv.born_length, kv.table.length)

    def _version(self, cut: Cut, number: int, kv: KvFile, old: Known) -> Known:
        """Put a version's rows into the cut, unless the index has equal rows. After an append has copied the last page,
        the pages may have slots for fewer entries than the index has. Then the index keeps its entries.
        """
        length, full_length = self.durable_length(kv), kv.table.length + kv.lost
        identity = self._own if kv.identity == OWN else kv.identity
        num_same = kv.begin_commit()
        num_kept = min(old.length, num_same) if old.kv is kv else 0
        cut.versions.append(kv)
        if length >= num_kept:
            pages = kv.table.pages[: pages_for(length)]
            slots = self._pool.on_disk.slot[pages]
        else:
            length, pages, slots = num_kept, NO_SLOTS, old.slots[: pages_for(num_kept)]
        turns = turns_within(kv.turns, length)
        same = (old.length, old.full_length, old.turns) == (length, full_length, turns)
        if old.kv is kv and same and np.array_equal(old.slots, slots):
            return old
        if old.kv is not None:
            cut.old_slots.append((old.identity, old.slots))
        if old.backing != NO_BYTES:
            self._drop_backing(cut, number, old.backing)
        if pages.size:
            self._record_slots(cut, identity, pages, slots)
        cut.new_slots.append((identity, slots))
        marks = marks_within(kv.all_marks(self._bits), length)
        record = VersionRecord(identity, length, full_length, marks, slots, turns)
        cut.rows.versions.append((number, encode_version(number, record)))
        return Known(old.num_names, NO_BYTES, kv, length, full_length, identity, slots, turns)

    def _record_slots(self, cut: Cut, identity: int, pages: IntArray, slots: IntArray) -> None:
        """Put rows into the cut for slots that have no row yet."""
        pool, recorded = self._pool, self._slots[identity].recorded
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            if slot in recorded:
                continue
            kept = int(pool.on_disk.kept[page])
            entries = np.zeros((2, PAGE_ENTRIES), np.dtype("<i4"))
            entries[0, :kept], entries[1, :kept] = pool.tokens[page, :kept], pool.positions[page, :kept]
            record = SlotRecord(slot, int(pool.on_disk.check[page]), kept, entries.tobytes())
            assert len(record.entries) == ENTRY_BYTES
            cut.rows.slots.append(
                (identity, slot, signed(record.check), kept, record.entries, slot_check(identity, record))
            )
            recorded.add(slot)

    # The end of a commit

    def succeeded(self, cut: Cut) -> None:
        """Note that the commit succeeded: the index has the rows of the cut."""
        for number, known in cut.known.items():
            if known is None:
                self.known.pop(number, None)
            else:
                self.known[number] = known
        for xattrs, changes in cut.xattrs:
            xattrs.kept = changes
            xattrs.put_away()
        self.sums.committed(cut.sums)
        for kv in cut.versions:
            kv.committed()
        for identity, slots in _by_identity(cut.old_slots):
            self._slots[identity].need_no_more(slots)
        self._kept_next_inode = cut.rows.next_inode or self._kept_next_inode
        for inode in cut.inodes:
            if not self.knows(inode, extent_of(inode.content)):
                self._journal.of_rest(inode)

    def knows(self, inode: Inode, extent: int) -> bool:
        """Return whether an inode's content is on disk up to `extent`, or up to its end if the content is shorter now.
        An inode without a name counts as kept.
        """
        content, known = inode.content, self.known.get(inode.number)
        if content is None or not inode.names:
            return True
        if isinstance(content, PlainFile):  # its backing file may have been made after the cut
            is_named = known is not None and known.backing == content.number
            return content.is_synced(extent) and (is_named or not content.exists)
        return known is not None and known.kv is content and known.length >= min(extent, content.table.length)

    def failed(self, cut: Cut) -> list[tuple[int, IntArray]]:
        """Note that the index may or may not have the cut. Return the slots that stay needed until the next successful
        commit.
        """
        self._journal.give_back(cut.changes, cut.inodes)
        self.sums.not_committed(cut.sums)
        for row in cut.rows.slots:
            identity, slot, *_ = row
            assert isinstance(identity, int)
            assert isinstance(slot, int)
            self._slots[identity].recorded.discard(slot)
        self._gone_slots += cut.rows.gone_slots
        self._journal.gone_xattrs.update(number for (number,) in cut.rows.gone_xattrs)
        return cut.new_slots


def _by_identity(slots: Sequence[tuple[int, IntArray]]) -> Iterator[tuple[int, IntArray]]:
    """Yield each identity with all its slots in one array, because numpy handles many slots in the time of one call."""
    for identity in {each for each, _ in slots}:
        yield identity, np.concatenate([some for each, some in slots if each == identity])


_UNKNOWN = Known(0)
