"""What was computed before is used again: KV files of one tenant, found by the longest prefix of a prompt.

The policy is this module's, not the daemon's. Each answer leaves its file here, without a name, as long as there is
room: the next turn of that conversation forks it, and so does any prompt that begins as it does. Prompts that arrive
together and begin alike compute that part once: the others wait until the first has it.

A tenant has a cache of its own, over a connection of its own. So no key learns from an answer, or from how long it
took, what another key has asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import anyio

import libsym as sym

BLOCK_TOKENS = 16
"""Prefixes are looked up by blocks of so many tokens; shorter ones are not worth a fork."""
MAX_ENTRIES = 1000
_COMPARED = 8
"""Of the files that share all of a prompt's known blocks, so many are compared token by token."""


@dataclass(eq=False, slots=True)
class Entry:
    """A file, and the tokens that it has, or more while an answer is appended to it."""

    kv: sym.KV
    tokens: Sequence[int]
    used: int = 0
    blocks: list[int] = field(default_factory=list)
    is_growing: bool = False
    """An answer's: it is not closed here before that has ended."""


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that is being computed."""

    tokens: Sequence[int]
    is_over: anyio.Event = field(default_factory=anyio.Event)


class Cache:
    """Of one tenant; used within `tenant.use()`, by any number of tasks of one event loop."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Of all entries; what they share is counted in each."""
        self._entries: dict[Entry, None] = {}
        self._by_block: dict[int, dict[Entry, None]] = {}
        self._prefills: dict[_Prefill, None] = {}
        self._uses = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    @asynccontextmanager
    async def place(self, tokens: Sequence[int], session: sym.KV | None = None) -> AsyncIterator[tuple[sym.KV, int]]:
        """A file without a name that has the longest known prefix of `tokens`, and how long that is; never all of them.

        In the block the rest is to be computed: others that begin alike wait for the end of it. `session`: a fork of
        the session's file, which may know more.
        """
        while (other := self._worth_waiting_for(tokens)) is not None:
            await other.is_over.wait()
        prefill = _Prefill(tokens)
        self._prefills[prefill] = None  # nothing was awaited since the others were looked at
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
        kv = await sym.aio.kv_fork(entry.kv)
        await sym.aio.kv_truncate(kv, length)
        return kv, length

    def keep(self, kv: sym.KV, tokens: Sequence[int], *, is_growing: bool = False) -> Entry:
        """The file, which has these tokens, is here for others from now on; what it makes superfluous goes."""
        entry = Entry(kv, tokens, next(self._uses), list(_block_hashes(tokens)), is_growing)
        for known in self._within(entry):
            self.drop(known)
        self._entries[entry] = None
        self.num_tokens += len(tokens)
        for block in entry.blocks:
            self._by_block.setdefault(block, {})[entry] = None
        self.shrink(self.max_tokens)
        return entry

    def grown(self, entry: Entry, tokens: Sequence[int]) -> None:
        """The answer has ended, and these are the tokens of its file."""
        self.drop(entry)  # which leaves the file open
        self.keep(entry.kv, tokens)

    def drop(self, entry: Entry) -> None:
        """Nobody finds it any more; its file is closed, unless an answer needs it."""
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
        """Drops what was not used for longest until no more tokens are left; gives how many files went."""
        num_dropped = 0
        oldest = iter(sorted(self._entries, key=lambda each: each.used))
        while self._entries and (self.num_tokens > max_tokens or len(self._entries) > MAX_ENTRIES):
            self.drop(next(oldest))
            num_dropped += 1
        return num_dropped

    def _within(self, entry: Entry) -> list[Entry]:
        """Entries that are a prefix of this one."""
        found: dict[Entry, None] = {}
        for block in entry.blocks:
            for known in self._by_block.get(block, ()):
                if known.blocks and known.blocks[-1] == block and len(known.tokens) <= len(entry.tokens):
                    found[known] = None
        return [each for each in found if list(entry.tokens[: len(each.tokens)]) == list(each.tokens)]

    def _longest(self, tokens: Sequence[int]) -> tuple[Entry | None, int]:
        holders: Iterable[Entry] = ()
        for block in _block_hashes(tokens):
            if block not in self._by_block:
                break
            holders = self._by_block[block]
        latest = sorted(holders, key=lambda each: -each.used)[:_COMPARED]
        best = max(latest, key=lambda each: in_common(each.tokens, tokens), default=None)
        length = 0 if best is None else min(in_common(best.tokens, tokens), len(tokens) - 1)
        return (best, length) if length >= BLOCK_TOKENS else (None, 0)

    def _worth_waiting_for(self, tokens: Sequence[int]) -> _Prefill | None:
        """A prompt under way that has more of this one than is known."""
        if not self._prefills:
            return None
        _, known = self._longest(tokens)
        most, found = known + BLOCK_TOKENS, None
        for prefill in self._prefills:
            if not prefill.is_over.is_set() and (length := in_common(prefill.tokens, tokens)) >= most:
                most, found = length + 1, prefill
        return found


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most  # they are equal up to low, and not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _block_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """One for each block, of all tokens up to its end."""
    found = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        found = hash((found, *tokens[end - BLOCK_TOKENS : end]))
        yield found
