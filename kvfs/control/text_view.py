"""The text of KV files, read as bytes at offsets: sizes for `stat`, pieces for `read`.

Where each entry's text ends is remembered with a version of a file and grows with it: so the size of a long context
costs nothing once it is known, and a piece in the middle is found without its beginning. The text itself is not kept.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import trio

from kvfs.control.sources import ControlFiles
from kvfs.names.content import KvFile
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import pages_for
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES

_INLINE_TOKENS = 4096
"""Pieces of up to so many tokens are put together at once (0.3 ms), longer ones in a worker."""


class _Ends:
    """Where the text of each entry ends, in bytes from the beginning of the file's text."""

    __slots__ = ("_values", "num_entries")

    def __init__(self) -> None:
        self._values = np.empty(0, np.int64)
        self.num_entries = 0

    @property
    def values(self) -> npt.NDArray[np.int64]:
        return self._values[: self.num_entries]

    @property
    def last(self) -> int:
        """Bytes of the whole text."""
        return int(self._values[self.num_entries - 1]) if self.num_entries else 0

    def extend(self, lengths: IntArray) -> None:
        begin, end = self.num_entries, self.num_entries + len(lengths)
        if end > self._values.size:
            values = np.empty(max(end, 2 * self._values.size), np.int64)
            values[:begin] = self.values
            self._values = values
        np.cumsum(lengths, out=self._values[begin:end])
        self._values[begin:end] += self.last
        self.num_entries = end


class TextView:
    """The texts of the files of one volume. Owned by the trio thread."""

    def __init__(self, files: ControlFiles) -> None:
        self._files = files
        self._lengths = files.token_lengths
        self._ends: WeakKeyDictionary[KvFile, _Ends] = WeakKeyDictionary()

    def size(self, kv: KvFile) -> int:
        """Bytes of the text as it is now."""
        return self._known(kv).last

    def entries_within(self, kv: KvFile, size: int) -> int:
        """How many entries have their text within the first `size` bytes."""
        return int(np.searchsorted(self._known(kv).values, size, side="right"))

    async def read(self, kv: KvFile, offset: int, size: int) -> bytes:
        """As `pread(2)`, of the text as it is now."""
        ends = self._known(kv)
        stop_at = min(offset + size, ends.last)
        if offset >= stop_at:
            return b""
        values = ends.values
        first = int(np.searchsorted(values, offset, side="right"))
        stop = int(np.searchsorted(values, stop_at, side="left")) + 1
        tokens = _tokens(kv.table, first, stop)
        # Counted from the end: the first token's text may be shown in part.
        begin, end = offset - int(values[stop - 1]), stop_at - int(values[stop - 1])
        if len(tokens) <= _INLINE_TOKENS:
            text = self._files.text_bytes(tokens.tolist())
        else:
            text = await trio.to_thread.run_sync(lambda: self._files.text_bytes(tokens.tolist()))
        return text[len(text) + begin : len(text) + end]

    def _known(self, kv: KvFile) -> _Ends:
        """The ends of every entry that the file has now."""
        ends = self._ends.get(kv)
        if ends is None:
            ends = self._ends[kv] = _Ends()
        table = kv.table
        ends.num_entries = min(ends.num_entries, kv.fewest)  # what was cut away meanwhile may have become another text
        kv.fewest = table.length
        if ends.num_entries < table.length:
            tokens = _tokens(table, ends.num_entries, table.length)
            lengths = self._lengths[tokens]
            if ends.num_entries == 0:
                lengths[0] -= self._files.num_hidden_bytes(int(tokens[0]))
            ends.extend(lengths)
        return ends


def _tokens(table: PageTable, first: int, stop: int) -> IntArray:
    """The tokens of entries first to stop - 1, as an array of the caller's own."""
    first_page = first // PAGE_ENTRIES
    pages = table.pages[first_page : pages_for(stop)]
    begin = first_page * PAGE_ENTRIES
    return table.pool.tokens[pages].reshape(-1)[first - begin : stop - begin]
