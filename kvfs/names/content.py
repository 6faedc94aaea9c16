"""Contents of a regular file: the bytes of a plain file, or one version of a KV file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from kvfs.names.plain import PlainFile
from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable
from kvfs.pages.turns import fitting, turns_within, with_turn

OWN = -1

Marks: TypeAlias = tuple[tuple[str, int], ...]


def marks_within(marks: Marks, length: int) -> Marks:
    """Return the marks of the first `length` entries."""
    found: list[tuple[str, int]] = []
    for by, stop in marks:
        if length and (not found or found[-1][1] < length):
            found.append((by, min(stop, length)))
    return tuple(found)


class TurnUnderWay(NamedTuple):
    """A turn of a conversation whose answer is not complete. The answer is being generated, or was cancelled and may be
    cut.
    """

    by: object
    """The handle that appends the turn."""
    length: int
    """Length of the file without the turn."""


class Seen(Protocol):
    """The entries that a reader has open. They stay the same if the file changes."""

    @property
    def turns(self) -> bytes: ...

    def held(self) -> tuple[IntArray, int]:
        """Return the pages that the reader holds references to, and the number of entries."""
        ...


class KvFile:
    """A version of a KV file. The file's inode and all handles that opened the version share this object.

    A truncation to 0 bytes gives the inode a new content. Handles keep this version, and its last user frees the pages.
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
        length = table.length
        self.table = table
        self.identity = identity
        """The identity of the pages, by its number in the index. OWN: the identity of the running model."""
        self._marks, self._turns, self._is_arriving = marks, b"", False
        self._under_way: TurnUnderWay | None = None
        self._tell_core()
        self.forked_from: tuple[int, int] | None = None
        """If this daemon forked the version from a file: the inode number of that file, and the number of entries taken
        from the file.
        """
        self.lost = 0
        """Entries that were not on disk when the last daemon ended, and are lost."""
        self.born_length = length
        """Number of entries that the version began with. A fork or an import enters the index with all of these
        entries, or not at all.
        """
        self.users = 1
        self.changes = 0
        """Count of changes to the entries. Equal counts mean an equal image."""
        self.fewest = length
        """The smallest number of entries that the file has had since the text view last read them. The entries below
        this number are unchanged.
        """
        self._fewest_since_commit = self._fewest_since_cut = length

    @classmethod
    def of_branch(cls, table: PageTable) -> KvFile:
        """Make the Python object of a branch in the core. The branch's inode and one handle are its users."""
        core, kv = table.core, cls(table)
        kv.forked_from = core.forked_from, core.forked_length
        kv.changes = core.changes
        kv.born_length = kv.fewest = kv._fewest_since_commit = kv._fewest_since_cut = core.fewest
        kv.retain()
        return kv

    # ---- state that a fork copies or ends. The core forks a file without Python only if the file has no such state.

    @property
    def marks(self) -> Marks:
        """Pairs of a mark and the entry before which the mark's range ends. This daemon has computed all entries after
        the last range.
        """
        return self._marks

    @marks.setter
    def marks(self, marks: Marks) -> None:
        self._marks = marks
        self._tell_core()

    @property
    def turns(self) -> bytes:
        """The places where the last turns of the conversation begin: see `kvfs.pages.turns`."""
        return self._turns

    @turns.setter
    def turns(self, turns: bytes) -> None:
        self._turns = turns
        self._tell_core()

    @property
    def under_way(self) -> TurnUnderWay | None:
        """The turn whose answer is not complete, or None."""
        return self._under_way

    @under_way.setter
    def under_way(self, turn: TurnUnderWay | None) -> None:
        self._under_way = turn
        self._tell_core()

    @property
    def is_arriving(self) -> bool:
        """Whether the version is an image that was copied in, and that no program has used yet. The copying program may
        still set the file's attributes.
        """
        return self._is_arriving

    @is_arriving.setter
    def is_arriving(self, is_arriving: bool) -> None:
        self._is_arriving = is_arriving
        self._tell_core()

    def _tell_core(self) -> None:
        is_foreign = self.identity != OWN
        self.table.core.is_odd = bool(self._marks or self._turns or self._under_way or self._is_arriving or is_foreign)

    # ---- counts of the core

    @property
    def hits(self) -> int:
        """Count of opens, forks and reads."""
        return int(self.table.core.hits)

    @hits.setter
    def hits(self, hits: int) -> None:
        self.table.core.hits = hits

    @property
    def cuts(self) -> int:
        """Count of truncations. If the count has not changed, all earlier entries are unchanged."""
        return int(self.table.core.cuts)

    @property
    def heat(self) -> float:
        """The heat that the version had at its last use, at the time `used_s`. Both are 0 before the first use: see
        `kvfs.volume.heat`.
        """
        return float(self.table.core.heat)

    @property
    def used_s(self) -> float:
        """The time when the version was last used."""
        return float(self.table.core.used_s)

    def used_by_program(self) -> None:
        """Note that a program has opened or forked the file."""
        self.hits += 1
        self.is_arriving = False

    def fork(self, number: int, owner: int, seen: Seen | None = None) -> KvFile:
        """Make a version with these entries, marks and turns, charged to `owner`, or raise OverQuota.

        `number`: the inode number of this file. `seen`: the entries of a reader, which are forked instead of the
        current entries.
        """
        table = self.table.fork(owner, None if seen is None else seen.held())
        fork = KvFile(table, self.identity, marks_within(self.marks, table.length))
        fork.turns = turns_within(self.turns if seen is None else seen.turns, table.length)
        fork.forked_from = (number, table.length)
        return fork

    def goes_on(self, turn_tokens: IntArray | None) -> None:
        """Note that a call is about to append. `turn_tokens`: the tokens of the file and of the call, if the call is a
        turn; None: the call is not a turn, and the records of all turns are dropped.
        """
        self.under_way = None
        turns = b"" if turn_tokens is None else with_turn(self.turns, turn_tokens)
        if turns != self.turns:
            self.turns = turns
            self.changes += 1

    def turn_ended(self, *, by_itself: bool) -> None:
        """Note that the call of a turn is over. If the call appended nothing, the turn's record is dropped.
        `by_itself`: the answer is complete.
        """
        self.turns = turns_within(self.turns, self.table.length)
        if by_itself:
            self.under_way = None

    def fitting_turns(self) -> tuple[int, ...]:
        """Return the lengths that the file had before each of its last turns, as far as they are known."""
        return tuple(fitting(self.turns, self.table.read()[0])) if self.turns else ()

    def cut(self, length: int) -> None:
        """Keep the first `length` entries."""
        self.turns, self.under_way = turns_within(self.turns, length), None
        self.table.truncate(length)
        self.changes += 1
        self.fewest = min(self.fewest, length)
        self._fewest_since_cut = min(self._fewest_since_cut, length)
        self.born_length = min(self.born_length, length)
        self.lost = 0
        self.marks = marks_within(self.marks, length)

    def begin_commit(self) -> int:
        """Begin a commit of the entries. Return how many entries, from the first entry on, are unchanged since the last
        commit.
        """
        self._fewest_since_commit = min(self._fewest_since_commit, self._fewest_since_cut)
        self._fewest_since_cut = self.table.length
        return self._fewest_since_commit

    def committed(self) -> None:
        """Note that the latest commit has succeeded."""
        self._fewest_since_commit = self._fewest_since_cut

    def all_marks(self, bits: str) -> Marks:
        """Return the marks of every entry. `bits` marks the entries that this daemon computed."""
        length, stop = self.table.length, self.marks[-1][1] if self.marks else 0
        if length == stop:
            return self.marks
        if self.marks and self.marks[-1][0] == bits:
            return (*self.marks[:-1], (bits, length))
        return (*self.marks, (bits, length))

    def marks_of_part(self, length: int) -> Marks:
        """Return the marks of a file of `length` entries that is made from some entries of this file. Any of these
        entries may have a mark, so all entries of the new file get the first mark.
        """
        return ((self.marks[0][0], length),) if self.marks else ()

    def num_other_bits(self, bits: str) -> int:
        """Return the number of entries up to the last entry whose mark is not `bits`. Only later entries are sure to
        have the bits that this daemon computes.
        """
        return max((stop for by, stop in self.marks if by != bits), default=0)

    def retain(self) -> None:
        assert self.users > 0
        self.users += 1

    def release(self) -> bool:
        """Remove a user. If this was the last user, free the pages. Return whether this was the last user."""
        assert self.users > 0
        self.users -= 1
        if self.users == 0:
            self.table.close()
        return self.users == 0


@dataclass(frozen=True, slots=True, eq=False)
class Elsewhere:
    """A version of a KV file that other machines have. An open brings the version here: see `kvfs.names.agreement`."""

    num_entries: int
    size: int
    """Size of the image in bytes."""


Content: TypeAlias = PlainFile | KvFile | Elsewhere
