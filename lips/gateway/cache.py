"""Cache of one tenant's KV files: a prompt forks the file that has its longest prefix.

This module, not the daemon, decides which files stay. While the cache has room, it keeps the unnamed file of each
answer. The next turn of that conversation forks the file, and so does each prompt with the same beginning. A beginning
that concurrent prompts share is computed once: later prompts wait until the first prompt has computed it.

Each tenant has its own cache and its own connection. So a client cannot learn the requests of another key from an
answer or from its timing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import anyio

import libsym as sym

BLOCK_TOKENS = 16
"""Number of tokens in a block. Prefixes are looked up by blocks. A prefix of less than a block is not worth a fork."""
MAX_ENTRIES = 1000
_COMPARED = 8
"""Maximum number of files that a lookup compares token by token with a prompt. All these files share the prompt's known
blocks.
"""


@dataclass(eq=False, slots=True)
class CachedFile:
    """A KV file and its tokens. While an answer grows, the file has more tokens than listed here."""

    kv: sym.KV
    tokens: Sequence[int]
    used: int = 0
    blocks: list[int] = field(default_factory=list)
    is_growing: bool = False
    """Whether an answer is being appended to the file. The cache never closes such a file."""


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that is being computed."""

    tokens: Sequence[int]
    is_over: anyio.Event = field(default_factory=anyio.Event)


class Cache:
    """Cache of one tenant, used within `tenant.use()` by any number of tasks of one event loop."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens of all entries; shared tokens count once in each entry."""
        self._entries: dict[CachedFile, None] = {}
        """In the order of their last use."""
        self._by_block: dict[int, dict[CachedFile, None]] = {}
        self._prefills: dict[_Prefill, None] = {}
        self._uses = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    @asynccontextmanager
    async def place(self, tokens: Sequence[int], session: sym.KV | None = None) -> AsyncIterator[tuple[sym.KV, int]]:
        """Yield an unnamed file with the longest known prefix of `tokens`, and the length of the prefix.

        The prefix omits at least the last token. The caller computes the rest within the `with` block. Until the block
        ends, prompts with the same beginning wait. `session` is a fork of the session's file, which may have a longer
        prefix.
        """
        while (other := self._worth_waiting_for(tokens)) is not None:
            await other.is_over.wait()
        prefill = _Prefill(tokens)
        self._prefills[prefill] = None  # no await since the check of the other prefills
        try:
            yield await self._prefix(tokens, session)
        finally:
            prefill.is_over.set()
            del self._prefills[prefill]

    async def _prefix(self, tokens: Sequence[int], session: sym.KV | None) -> tuple[sym.KV, int]:
        entry, length = self._longest(tokens)
        if session is not None:
            in_file = min(in_common((await sym.aio.kv_read(session))[0], tokens), len(tokens) - 1)
            if in_file >= length:
                await sym.aio.kv_truncate(session, in_file)
                return session, in_file
        if entry is None or entry.kv.closed:
            return await sym.aio.kv_create(), 0
        entry.used = next(self._uses)
        if entry in self._entries:  # an await above may have let it go
            self._entries[entry] = self._entries.pop(entry)
        kv = await sym.aio.kv_fork(entry.kv)
        await sym.aio.kv_truncate(kv, length)
        return kv, length

    def keep(self, kv: sym.KV, tokens: Sequence[int], *, is_growing: bool = False) -> CachedFile:
        """Keep a file with these tokens for later prompts; drop entries that are prefixes of this file."""
        entry = CachedFile(kv, tokens, next(self._uses), list(_block_hashes(tokens)), is_growing)
        for known in self._within(entry):
            self.drop(known)
        self._entries[entry] = None
        self.num_tokens += len(tokens)
        for block in entry.blocks:
            self._by_block.setdefault(block, {})[entry] = None
        self.shrink(self.max_tokens)
        return entry

    def grown(self, entry: CachedFile, tokens: Sequence[int]) -> None:
        """Replace the entry of an answer that has ended; `tokens`: the tokens that its file has now."""
        self.drop(entry)  # leaves the file open
        self.keep(entry.kv, tokens)

    def drop(self, entry: CachedFile) -> None:
        """Remove an entry from the cache. Its file is closed, unless an answer is still appended to it."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.num_tokens -= len(entry.tokens)
        for block in entry.blocks:
            holders = self._by_block[block]
            holders.pop(entry, None)
            if not holders:
                del self._by_block[block]
        if not entry.is_growing:
            entry.kv.channel.close_soon(entry.kv.give_up())

    def shrink(self, max_tokens: int) -> int:
        """Drop the least recently used entries until at most `max_tokens` tokens remain. Return the number of drops."""
        num_dropped = 0
        while self._entries and (self.num_tokens > max_tokens or len(self._entries) > MAX_ENTRIES):
            self.drop(next(iter(self._entries)))
            num_dropped += 1
        return num_dropped

    def _within(self, entry: CachedFile) -> list[CachedFile]:
        """Return the entries whose tokens are a prefix of the tokens of `entry`."""
        found: dict[CachedFile, None] = {}
        for block in entry.blocks:
            for known in self._by_block.get(block, ()):
                if known.blocks and known.blocks[-1] == block and len(known.tokens) <= len(entry.tokens):
                    found[known] = None
        return [each for each in found if list(entry.tokens[: len(each.tokens)]) == list(each.tokens)]

    def _longest(self, tokens: Sequence[int]) -> tuple[CachedFile | None, int]:
        holders: Iterable[CachedFile] = ()
        for block in _block_hashes(tokens):
            if block not in self._by_block:
                break
            holders = self._by_block[block]
        latest = sorted(holders, key=lambda each: -each.used)[:_COMPARED]
        best = max(latest, key=lambda each: in_common(each.tokens, tokens), default=None)
        length = 0 if best is None else min(in_common(best.tokens, tokens), len(tokens) - 1)
        return (best, length) if length >= BLOCK_TOKENS else (None, 0)

    def _worth_waiting_for(self, tokens: Sequence[int]) -> _Prefill | None:
        """Return the prefill with the longest common prefix with `tokens`, if it is longer than the cached prefix."""
        if not self._prefills:
            return None
        _, known = self._longest(tokens)
        most, found = known + BLOCK_TOKENS, None
        for prefill in self._prefills:
            if not prefill.is_over.is_set() and (length := in_common(prefill.tokens, tokens)) >= most:
                most, found = length + 1, prefill
        return found


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most  # equal up to low, different up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _block_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Yield a hash of all tokens up to the end of each block."""
    found = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        found = hash((found, *tokens[end - BLOCK_TOKENS : end]))
        yield found
