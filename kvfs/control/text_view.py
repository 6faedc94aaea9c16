"""Text view: shows KV files as text. The view knows the size of each text for `stat`, and reads pieces of the text at
byte offsets.

For each version of a file, the view remembers the byte at which each entry's text ends. So the size of a long context
is known at once, and a piece in the middle is found without decoding the beginning. The view does not keep the text.
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
"""A piece of up to this many tokens is decoded by the trio thread (0.3 ms), a longer piece by a worker."""


class _Ends:
    """For each entry of a file, the offset in the file's text at which the entry's text ends, in bytes."""

    __slots__ = ("_values", "num_entries")

    def __init__(self) -> None:
        self._values = np.empty(0, np.int64)
        self.num_entries = 0

    @property
    def values(self) -> npt.NDArray[np.int64]:
        return self._values[: self.num_entries]

    @property
    def last(self) -> int:
        """Length of the whole text in bytes."""
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
        """Return the current length of the text in bytes."""
        return self._known(kv).last

    def entries_within(self, kv: KvFile, size: int) -> int:
        """Return the number of entries whose text lies within the first `size` bytes."""
        return int(np.searchsorted(self._known(kv).values, size, side="right"))

    async def read(self, kv: KvFile, offset: int, size: int) -> bytes:
        """Read the current text as `pread(2)` does."""
        ends = self._known(kv)
        stop_at = min(offset + size, ends.last)
        if offset >= stop_at:
            return b""
        values = ends.values
        first = int(np.searchsorted(values, offset, side="right"))
        stop = int(np.searchsorted(values, stop_at, side="left")) + 1
        tokens = _tokens(kv.table, first, stop)
        # Count offsets from the end of the decoded text, because the beginning of a file's first token may be hidden.
        begin, end = offset - int(values[stop - 1]), stop_at - int(values[stop - 1])
        if len(tokens) <= _INLINE_TOKENS:
            text = self._files.text_bytes(tokens.tolist())
        else:
            text = await trio.to_thread.run_sync(lambda: self._files.text_bytes(tokens.tolist()))
        return text[len(text) + begin : len(text) + end]

    def _known(self, kv: KvFile) -> _Ends:
        """Return the ends of all entries that the file has now."""
        ends = self._ends.get(kv)
        if ends is None:
            ends = self._ends[kv] = _Ends()
        table = kv.table
        ends.num_entries = min(ends.num_entries, kv.fewest)  # entries after a truncation may have other text
        kv.fewest = table.length
        if ends.num_entries < table.length:
            tokens = _tokens(table, ends.num_entries, table.length)
            lengths = self._lengths[tokens]
            if ends.num_entries == 0:
                lengths[0] -= self._files.num_hidden_bytes(int(tokens[0]))
            ends.extend(lengths)
        return ends


def _tokens(table: PageTable, first: int, stop: int) -> IntArray:
    """Return the tokens of entries `first` to `stop - 1`, as a new array."""
    first_page = first // PAGE_ENTRIES
    pages = table.pages[first_page : pages_for(stop)]
    begin = first_page * PAGE_ENTRIES
    return table.pool.tokens[pages].reshape(-1)[first - begin : stop - begin]
