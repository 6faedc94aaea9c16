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
        "born_length",
        "changes",
        "cuts",
        "fewest",
        "forked_from",
        "heat",
        "hits",
        "identity",
        "is_arriving",
        "lost",
        "marks",
        "table",
        "turns",
        "under_way",
        "used_s",
        "users",
    )

    def __init__(self, table: PageTable, identity: int = OWN, marks: Marks = ()) -> None:
        self.table = table
        self.identity = identity
        """The identity of its pages, by the index's number; OWN: the running model's."""
        self.marks = marks
        """Pairs of a mark and the entry up to which it holds; later entries were computed by this daemon."""
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
        self.turns = b""
        """Where the last turns of its conversation begin: see `kvfs.pages.turns`."""
        self.under_way: TurnUnderWay | None = None
        self.hits = 0
        """Counts opens, forks and reads."""
        self.is_arriving = False
        """Whether it is an image that was copied here, and no program has used it yet: its attributes may follow."""
        self.heat = self.used_s = 0.0
        """See `kvfs.heat`: how warm it was when it was used last, and when that was; both 0 before."""
        self.cuts = 0
        """Counts truncations: with equal counts, entries that were there are there unchanged."""
        self._fewest_since_commit = self._fewest_since_cut = table.length

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
        self.cuts += 1
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
