"""Expected files of a storm: every entry of each in plain Python, and the entries that were promised.

An entry is (token, position, value, moved). The fake decoder's result for it is known without a look at any page.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import trio

from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.pages.table import PageTable
from kvfs.tiers.moves import ERROR_LIVES_S
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError
from tests.kvfs.durable.house import House
from tests.kvfs.fakes import FakeDecoder, entry_value

Entry: TypeAlias = tuple[int, int, float, int]
"""(token, position, value, how many positions it was moved up)."""


class Lost(AssertionError):
    """Difference between a file and its expected entries."""


@dataclass(slots=True, eq=False)
class Sync:
    """A sync under way."""

    begun: int
    length: int
    """Entries that are promised when it returns."""


@dataclass(slots=True, eq=False)
class Mine:
    """A file, as it has to be."""

    inode: Inode
    path: str | None
    """Name of the file; None: the file is gone with its handle."""
    handle: OpenKv | None
    entries: list[Entry]
    promised: int = -1
    """Number of entries that a returned sync promised to be on disk; below 0: none was."""
    cut: list[tuple[int, list[Entry]]] = field(default_factory=list)
    """Entries before each cut, with its moment; since the last sync."""
    syncs: list[Sync] = field(default_factory=list)
    is_busy: bool = False
    """Whether a call is in flight, or a reader looks at the file."""

    @property
    def content(self) -> KvFile:
        content = self.inode.content if self.handle is None else self.handle.content
        assert isinstance(content, KvFile)
        return content

    @property
    def table(self) -> PageTable:
        return self.content.table

    def append(self, tokens: Sequence[int]) -> None:
        """Append the entries that a step computes for these tokens."""
        previous, position = (self.entries[-1][2], self.entries[-1][1] + 1) if self.entries else (0.0, 0)
        for place, token in enumerate(tokens, position):
            previous = entry_value(previous, token, place)
            self.entries.append((token, place, previous, 0))

    def truncate(self, length: int, moment: int) -> None:
        self.cut.append((moment, self.entries))
        self.entries = self.entries[:length]
        self.promised = min(self.promised, length)
        for sync in self.syncs:
            sync.length = min(sync.length, length)

    def begin_sync(self, moment: int) -> Sync:
        sync = Sync(moment, len(self.entries))
        self.syncs.append(sync)
        return sync

    def synced(self, sync: Sync) -> None:
        self.promised = max(self.promised, sync.length)
        self.cut = [(moment, entries) for moment, entries in self.cut if moment >= sync.begun]

    def may_be(self, found: Sequence[tuple[int, int]]) -> list[Entry] | None:
        """The entries that came back with these tokens and positions; None: that was never promised, nor possible."""
        if len(found) < self.promised:
            return None
        for entries in (self.entries, *(entries for _, entries in self.cut)):
            if [each[:2] for each in entries[: len(found)]] == found:
                return entries[: len(found)]
        return None

    def check_tokens(self, table: PageTable) -> None:
        """Check tokens and positions in the books, without a look at a page."""
        tokens, positions = table.read()
        if list(zip(tokens.tolist(), positions.tolist(), strict=True)) != [each[:2] for each in self.entries]:
            raise Lost(f"{self} has {len(tokens)} other entries than its {len(self.entries)}")

    def check(self, house: House, num_entries: int) -> None:
        """Check the first entries bit for bit; their pages are in memory."""
        if not num_entries:
            return
        table = self.table
        pages = house.fs.pool.store.frames_of(table.pages[: -(-num_entries // PAGE_ENTRIES)])
        wanted = np.array(self.entries[:num_entries])
        try:
            values, moved = house.decoder.moved_entries(pages, num_entries)
        except AssertionError as error:
            raise Lost(f"{self}: {error}") from error
        wrong = np.flatnonzero((values != wanted[:, 2]) | (moved != wanted[:, 3]))
        if wrong.size:
            raise Lost(f"{self}: entries {wrong[:8]} are {values[wrong[:8]]}, and have to be {wanted[wrong[:8], 2]}")

    def __str__(self) -> str:
        return f"{self.path or 'a file without a name'} (inode {self.inode.number}, {len(self.entries)} entries)"


def bytes_of(decoder: FakeDecoder, entries: Iterable[Entry]) -> bytes:
    """A page with these entries, zeros behind them."""
    page = np.zeros((*decoder.ramp.shape[:3], PAGE_ENTRIES, decoder.ramp.shape[3]), np.float32)
    for slot, (_, _, value, moved) in enumerate(entries):
        page[:, :, :, slot] = decoder.ramp + value
        page[:, 0, :, slot] += moved
    return page.tobytes()


def check_after_cut(house: House, files: Iterable[Mine]) -> list[Mine]:
    """The files that have come back after a daemon was cut off: what was promised is there, and nothing else."""
    known = {mine.inode.number: mine for mine in files}
    found: list[Mine] = []
    for inode in list(house.tree):
        if isinstance(inode.content, KvFile):
            mine = known.pop(inode.number, None)
            if mine is None:
                raise Lost(f"{house.tree.path_of(inode)} has never been")
            tokens, positions = inode.content.table.read()
            entries = mine.may_be(list(zip(tokens.tolist(), positions.tolist(), strict=True)))
            if entries is None:
                raise Lost(
                    f"{mine} came back as {house.tree.path_of(inode)} with {len(tokens)} entries that it has not had; "
                    f"promised were {mine.promised}"
                )
            path = str(house.tree.path_of(inode)).lstrip("/")
            found.append(Mine(inode, path, None, list(entries), promised=len(entries)))
    for mine in known.values():
        if mine.promised >= 0 and mine.path is not None:
            raise Lost(f"{mine} is gone, of which {mine.promised} entries were synced")
    return found


async def check_all(house: House, files: Iterable[Mine]) -> None:
    """Every file is what it has to be; brings each into memory."""
    for mine in files:
        mine.check_tokens(mine.table)
        for patience in (True, False):
            try:
                async with house.volume.pager.hold([mine.table]):
                    mine.check(house, len(mine.entries))
                    break
            except SymError as error:
                if not patience:
                    raise Lost(f"{mine} can't be read: {error}") from error
                await trio.sleep(1.1 * ERROR_LIVES_S)  # what the disk said last is believed for so long
