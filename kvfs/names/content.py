"""Contents behind a file's name: the bytes of a plain file, or one version of a KV file."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from kvfs.names.plain import PlainFile
from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable
from kvfs.pages.turns import fitting, turns_within, with_turn

OWN = -1

Marks: TypeAlias = tuple[tuple[str, int], ...]


def marks_within(marks: Marks, length: int) -> Marks:
    """Return the marks of the first entries alone."""
    found: list[tuple[str, int]] = []
    for by, stop in marks:
        if length and (not found or found[-1][1] < length):
            found.append((by, min(stop, length)))
    return tuple(found)


class TurnUnderWay(NamedTuple):
    """A turn of a conversation whose answer has not ended, or was cancelled and may be cut still."""

    by: object
    """The handle that it is appended by."""
    length: int
    """Of the file without it."""


class Seen(Protocol):
    """Entries that a reader sees, whatever the file has by now."""

    @property
    def turns(self) -> bytes: ...

    def held(self) -> tuple[IntArray, int]:
        """Pages that the reader has references on, and the number of entries."""
        ...


class KvFile:
    """A version of a KV file, shared by the inode that shows it and by every handle of a LIP that opened it.

    Truncating the name to nothing replaces the inode's content; handles keep this one, and the last of all users
    gives its pages back.
    """

    __slots__ = (
        "__weakref__",
        "_fewest_since_commit",
        "_fewest_since_cut",
        "_is_arriving",
        "_marks",
        "_turns",
        "_under_way",
        "born_length",
        "changes",
        "fewest",
        "forked_from",
        "identity",
        "lost",
        "table",
        "users",
    )

    def __init__(self, table: PageTable, identity: int = OWN, marks: Marks = ()) -> None:
        self.table = table
        self.identity = identity
        """The identity of its pages, by the index's number; OWN: the running model's."""
        self._marks, self._turns, self._is_arriving = marks, b"", False
        self._under_way: TurnUnderWay | None = None
        self._tell_core()
        self.forked_from: tuple[int, int] | None = None
        """The number of the file that this daemon forked it from, and the entries that it had from there."""
        self.lost = 0
        """Entries that it had when the daemon before ended, and that were not on disk."""
        self.born_length = table.length
        """Entries that it began with, of which none may be missing where it is kept: a fork, or an import, is whole."""
        self.users = 1
        self.changes = 0
        """Counts changes of the entries: equal counts mean an equal image."""
        self.fewest = table.length
        """The fewest entries it has had since the text view looked: those are as they were then."""
        self._fewest_since_commit = self._fewest_since_cut = table.length

    @classmethod
    def of_branch(cls, table: PageTable) -> KvFile:
        """The version that was a branch of the core's: its inode shows it, and one handle has it."""
        core, kv = table.core, cls(table)
        kv.forked_from = core.forked_from, core.forked_length
        kv.changes = core.changes
        kv.born_length = kv.fewest = kv._fewest_since_commit = kv._fewest_since_cut = core.fewest
        kv.retain()
        return kv

    # ---- what a fork takes over, or ends: the core forks a file by itself that has nothing of it

    @property
    def marks(self) -> Marks:
        """Pairs of a mark and the entry up to which it holds; later entries were computed by this daemon."""
        return self._marks

    @marks.setter
    def marks(self, marks: Marks) -> None:
        self._marks = marks
        self._tell_core()

    @property
    def turns(self) -> bytes:
        """Where the last turns of its conversation begin: see `kvfs.pages.turns`."""
        return self._turns

    @turns.setter
    def turns(self, turns: bytes) -> None:
        self._turns = turns
        self._tell_core()

    @property
    def under_way(self) -> TurnUnderWay | None:
        """The turn that a call appends now."""
        return self._under_way

    @under_way.setter
    def under_way(self, turn: TurnUnderWay | None) -> None:
        self._under_way = turn
        self._tell_core()

    @property
    def is_arriving(self) -> bool:
        """Whether it is an image that was copied here, and no program has used it yet: its attributes may follow."""
        return self._is_arriving

    @is_arriving.setter
    def is_arriving(self, is_arriving: bool) -> None:
        self._is_arriving = is_arriving
        self._tell_core()

    def _tell_core(self) -> None:
        is_foreign = self.identity != OWN
        self.table.core.is_odd = bool(self._marks or self._turns or self._under_way or self._is_arriving or is_foreign)

    # ---- what the core counts

    @property
    def hits(self) -> int:
        """Count of opens, forks and reads."""
        return int(self.table.core.hits)

    @hits.setter
    def hits(self, hits: int) -> None:
        self.table.core.hits = hits

    @property
    def cuts(self) -> int:
        """Count of truncations: with equal counts, entries that were there are there unchanged."""
        return int(self.table.core.cuts)

    @property
    def heat(self) -> float:
        """Heat when it was used last, at `used_s`; both are 0 before: see `kvfs.heat`."""
        return float(self.table.core.heat)

    @property
    def used_s(self) -> float:
        """When it was used last."""
        return float(self.table.core.used_s)

    def used_by_program(self) -> None:
        """A program has opened or forked the file."""
        self.hits += 1
        self.is_arriving = False

    def fork(self, number: int, owner: int, seen: Seen | None = None) -> KvFile:
        """A version with these entries, charged to an account; or raise OverQuota. Its marks, turns and origin say so.

        `number`: of this file. `seen`: what a reader sees of it, in place of the entries that it has now.
        """
        table = self.table.fork(owner, None if seen is None else seen.held())
        fork = KvFile(table, self.identity, marks_within(self.marks, table.length))
        fork.turns = turns_within(self.turns if seen is None else seen.turns, table.length)
        fork.forked_from = (number, table.length)
        return fork

    def goes_on(self, turn_tokens: IntArray | None) -> None:
        """A call is about to append: a turn of its conversation, which begins behind these tokens of the file and the
        call; None: something else, behind which the records would say too little.
        """
        self.under_way = None
        turns = b"" if turn_tokens is None else with_turn(self.turns, turn_tokens)
        if turns != self.turns:
            self.turns = turns
            self.changes += 1

    def turn_ended(self, *, by_itself: bool) -> None:
        """The call of a turn is over. One that appended nothing is no turn, whatever is written there later."""
        self.turns = turns_within(self.turns, self.table.length)
        if by_itself:
            self.under_way = None

    def fitting_turns(self) -> tuple[int, ...]:
        """The lengths that the file had before its last turns, as far as is known."""
        return tuple(fitting(self.turns, self.table.read()[0])) if self.turns else ()

    def cut(self, length: int) -> None:
        """Keep the first entries."""
        self.turns, self.under_way = turns_within(self.turns, length), None
        self.table.truncate(length)
        self.changes += 1
        self.fewest = min(self.fewest, length)
        self._fewest_since_cut = min(self._fewest_since_cut, length)
        self.born_length = min(self.born_length, length)
        self.lost = 0
        self.marks = marks_within(self.marks, length)

    def begin_commit(self) -> int:
        """A commit of the entries that it has now begins: how many are those that the last commit had of it."""
        self._fewest_since_commit = min(self._fewest_since_commit, self._fewest_since_cut)
        self._fewest_since_cut = self.table.length
        return self._fewest_since_commit

    def committed(self) -> None:
        """The commit that began last is over."""
        self._fewest_since_commit = self._fewest_since_cut

    def all_marks(self, bits: str) -> Marks:
        """Return the marks of every entry, if this daemon's own are of `bits`."""
        length, stop = self.table.length, self.marks[-1][1] if self.marks else 0
        if length == stop:
            return self.marks
        if self.marks and self.marks[-1][0] == bits:
            return (*self.marks[:-1], (bits, length))
        return (*self.marks, (bits, length))

    def marks_of_part(self, length: int) -> Marks:
        """Of a file of so many entries that is made of some of this one's: any may be of those that are marked."""
        return ((self.marks[0][0], length),) if self.marks else ()

    def num_other_bits(self, bits: str) -> int:
        """The first entries, up to the last one that something else computed: the bit promise ends at them."""
        return max((stop for by, stop in self.marks if by != bits), default=0)

    def retain(self) -> None:
        assert self.users > 0
        self.users += 1

    def release(self) -> bool:
        """Take a user away. True: that was the last one, and the pages were given back."""
        assert self.users > 0
        self.users -= 1
        if self.users == 0:
            self.table.close()
        return self.users == 0


Content: TypeAlias = PlainFile | KvFile
