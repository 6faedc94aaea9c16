"""Model of what a crash may leave: every state that a tree has had, its syncs, and a judge of what came back.

    model = Model(house)                    # a tree as it is on disk: empty, or just restored
    ...                                     # one operation on the house
    model.note(house)                       # each time, before anything else may run
    with model.syncing(inode.number): ...   # round every fsync; without a number: of everything
    await model.judge(restored)             # AssertionError: that is no state that was promised

A file is its inode's number, which survives. The promise, as it is judged here:

- *Names* are those after the first k operations, and after later ones that some fsync was to make durable. An fsync
  takes along earlier operations of the same names and files, of the directories that they lie in, and in a directory
  that is gone. If an fsync has returned 0, the names that it was about are there.
  (Once the disk was full: after any operations, with what they depend on.)
  A name of a file that is gone by then may lead where it led before.
- *Entries* of a KV file are a prefix of those at some moment since it was synced, or was given a name that is there.
  No entry is missing that the file has had all the time since then. The bytes are right, and the file says how many
  entries are lost.
- *Bytes* of a plain file that were not written since it was synced are there. The file has a length that it has had.
  No checksum that the index has of them is wrong.
- *Attributes* of an inode are those of some moment since it was synced.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.inode import OWN_NAME, Inode
from kvfs.names.plain import PlainFile
from libsym.errors import SymError
from tests.kvfs.durable.allowed_names import NamesThatAreThere
from tests.kvfs.durable.contents import Bytes, Entries, content_of, is_prefix, length_of, may_be_left
from tests.kvfs.durable.events import ROOT, Attributes, Key, Life, Operation, Put, Sync
from tests.kvfs.durable.house import House


class Model:
    """History of one tree: all events so far."""

    def __init__(
        self, house: House, mark: Callable[[int], None] = lambda _moment: None, *, has_bytes: bool = True
    ) -> None:
        """The house is as it is on disk; without `has_bytes`, but for the bytes of plain files, as after a kill.

        `mark` is told of each moment as soon as it is there.
        """
        self._has_bytes = has_bytes
        self.moment = 0
        """Moment of the last event."""
        self._mark = mark
        self._base = self._names = _names(house)
        self._operations: list[Operation] = []
        self._syncs: list[Sync] = []
        self._was_full = sys.maxsize
        """Since when it was said to be, perhaps for a moment."""
        self._inodes: dict[int, Inode] = {}
        """Inodes, also those that are gone: a crash may bring them back."""
        self._seen: dict[int, tuple[object, int, int]] = {}
        """The content whose state is known, and its count of changes."""
        self._lives: dict[int, Life] = {}
        self._look_at_files(house)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for another process, which judges with it."""
        return {**self.__dict__, "_mark": None, "_inodes": None, "_seen": None}

    # What happens

    def note(self, house: House) -> None:
        """Note an event: at most one operation on names, none of which can be on disk yet."""
        self.moment += 1
        names = _names(house)
        changed = sorted(key for key in self._names.keys() | names.keys() if self._names.get(key) != names.get(key))
        if changed:
            puts = tuple(Put(key, self._names.get(key), names.get(key)) for key in changed)
            self._operations.append(Operation(self.moment, puts))
            self._names = names
        self._look_at_files(house)
        self._mark(self.moment)

    def _look_at_files(self, house: House) -> None:
        self._inodes |= {inode.number: inode for inode in house.tree}
        for number, inode in self._inodes.items():
            life = self._lives.setdefault(number, Life())
            attributes = Attributes.of(inode)
            if inode.xattrs.is_away:  # they are as they were
                attributes = replace(attributes, xattrs=life.attributes.last.xattrs)
            life.attributes.add(self.moment, attributes)
            seen = inode.content, getattr(inode.content, "changes", 0), getattr(inode.content, "lost", 0)
            is_gone = inode.content is None and not inode.names and not inode.is_directory
            if self._seen.get(number) != seen and not is_gone:
                self._seen[number] = seen
                life.content.add(self.moment, content_of(inode))

    def has_xattrs(self, inode: Inode) -> bool:
        """Whether the attributes of an inode that were brought from the index are those that it had."""
        return self._lives[inode.number].attributes.last.xattrs == Attributes.of(inode).xattrs

    @contextmanager
    def syncing(self, number: int | None = None) -> Iterator[None]:
        """Round an fsync that somebody waits for; an exception says that nothing was promised."""
        self._tick()
        sync = Sync(number, self.moment, frozenset(self._above(number)))
        self._syncs.append(sync)
        was_named = self._named()
        yield
        self._tick()
        named = self._named()
        sync.ended, sync.named, sync.unnamed = self.moment, was_named & named, was_named - named
        sync.above_at_end = frozenset(self._above(number))

    def note_full_disk(self) -> None:
        """The disk says that it is full, from now on."""
        self._was_full = min(self._was_full, self.moment)

    def _tick(self) -> None:
        self.moment += 1
        self._mark(self.moment)

    def _named(self) -> frozenset[int]:
        return frozenset({ROOT, *self._names.values()})

    def _above(self, number: int | None) -> set[int]:
        """The directories that an inode lies in."""
        found: set[int] = set()
        waiting = set() if number is None else {number}
        while waiting:
            parents = {directory for (directory, _), child in self._names.items() if child in waiting}
            waiting = parents - found
            found |= parents
        return found

    # What came back

    async def judge(self, house: House, now: int | None = None) -> None:
        """Raise AssertionError, with the story, unless a crash after the event `now` may have left this."""
        now = self.moment if now is None else now
        house.fs.check()
        directories = {number for number, life in self._lives.items() if life.is_directory}
        names, is_ordered = _names(house), now < self._was_full
        there = NamesThatAreThere(
            self._base, self._operations, self._syncs, names, now, directories, is_ordered=is_ordered
        )
        named = [
            (put.after, each.moment)
            for each in there.happened()
            for put in each.puts
            if put.after is not None and (put.after not in there.gone or names.get(put.key) == put.after)
        ]
        for inode in house.tree:
            if inode.number not in self._lives:
                raise AssertionError(f"{_called(house, inode)} has never been")
            await house.keeper.bring_xattrs(inode)
            self._judge_attributes(house, inode, now)
            self._judge_content(house, inode, now, [moment for number, moment in named if number == inode.number])
        for inode in house.tree:
            await _judge_pages(house, inode)
        house.fs.check()

    def _promises(self, number: int, now: int) -> list[tuple[int, int]]:
        """Return the syncs of an inode that are over, as pairs of moments: at the second, the inode is on disk as it
        was at the first, except for entries that were cut off in between.
        """
        mine = [sync for sync in self._syncs if sync.is_over(now) and sync.promises(number)]
        return [(0, 0), *((sync.begun, sync.ended or 0) for sync in mine)]

    def _judge_attributes(self, house: House, inode: Inode, now: int) -> None:
        """A domain's quota is that of some moment by itself: names tell when it became one."""
        (since, _), found = max(self._promises(inode.number, now)), Attributes.of(inode)
        allowed = [state for _, state in self._lives[inode.number].attributes.between(since, now)]
        if found not in [replace(state, quota=each.quota) for state in allowed for each in allowed]:
            raise AssertionError(
                f"{_called(house, inode)} is\n  {found}\nand was, since [{since}]\n"
                + "\n".join(f"  {state}" for state in allowed)
            )

    def _judge_content(self, house: House, inode: Inode, now: int, named_at: Sequence[int]) -> None:
        number, found = inode.number, content_of(inode)
        history = self._lives[number].content
        named = [(moment, moment) for moment in named_at if isinstance(found, Entries)]
        promises = sorted({*self._promises(number, now), *named})
        since = promises[-1][0]
        if isinstance(found, Bytes):
            if promises == [(0, 0)] and number in self._base.values() and not self._has_bytes:
                return
            # A write is on its way before it is an event.
            is_right = may_be_left(found, [state for _, state in history.between(since, now + 1)])
        else:
            is_right = any(
                is_prefix(found, state)
                and length_of(found)
                >= max(
                    min(length_of(each) for _, each in history.between(begun, max(ended, moment)))
                    for begun, ended in promises
                )
                for moment, state in history.between(since, now)
            )
        if not is_right:
            raise AssertionError(
                f"{_called(house, inode)} came back with {found}. It is [{now}], and promised was what it had at "
                f"{[begun for begun, _ in promises]}:\n"
                + "\n".join(f"  [{moment}] {state}" for moment, state in history.between(0, now + 1))
            )


def _names(house: House) -> dict[Key, int]:
    """Return the inode that each name leads to; a domain has a name in itself."""
    names = {
        (directory.number, name): child.number for directory in house.tree for name, child in directory.entries.items()
    }
    domains = [inode.number for inode in house.tree if inode.domain is not None and inode.parent is not None]
    return names | {(number, OWN_NAME): number for number in domains}


async def _judge_pages(house: House, inode: Inode) -> None:
    if isinstance(inode.content, PlainFile):
        damaged = inode.content.verified(0, memoryview(bytearray(inode.content.size))).damaged
        assert not damaged, f"{_called(house, inode)} is said to be damaged in extents {damaged}"
    if not isinstance(inode.content, KvFile):
        return
    file = OpenKv(inode, inode.content, writable=False, origin=None)  # opening it would count as a use
    try:
        await house.volume.pager.put_in_memory(file.table)
    except SymError as error:
        raise AssertionError(f"{_called(house, inode)} can't be read: {error}") from error
    assert house.is_right(file), f"{_called(house, inode)} has other bytes than its tokens make"


def _called(house: House, inode: Inode) -> str:
    return f"{house.tree.path_of(inode)} (inode {inode.number})"
