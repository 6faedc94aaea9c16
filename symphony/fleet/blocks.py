"""Blocks: the pages of published files, as routers of other projects know them.

A block is a full page of tokens behind all the tokens before it. Its hash covers its tokens and the hash of the block
before it. So files with an equal prefix share blocks. A router takes a hash for a name, and computes hashes of its own
from the tokens.

Events have the schema of vLLM: a batch is `[time, events, rank]`, and an event is an array that begins with its name.
Since June 2026 vLLM writes an event as a map. Routers that read maps read arrays, too, and many read arrays alone.

Nothing here knows files or sockets. One thread at a time uses a `Blocks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from kvfs.pages.free_list import IntArray
from libsym.abi import PAGE_ENTRIES

BLOCKS_A_BATCH = 1024
"""Maximum number of blocks of a batch, which then takes up to 170 kB."""


@dataclass(frozen=True, slots=True)
class Change:
    """New pages of a published file."""

    file: int
    num_kept: int
    """Number of the file's pages, from the first one on, that stay. The others are gone."""
    pages: IntArray
    """Tokens of the pages behind these: [pages, PAGE_ENTRIES]."""


@dataclass(slots=True)
class _Block:
    parent: int | None
    tokens: bytes
    num_files: int = 0


class Blocks:
    """The blocks of all published files."""

    def __init__(self) -> None:
        self._chains: dict[int, list[int]] = {}
        """Hashes of each file's blocks."""
        self._blocks: dict[int, _Block] = {}
        """Blocks by hash, each behind its parent: every file that has a block has the block's parent, too."""

    def update(self, changes: Iterable[Change]) -> Iterator[bytes]:
        """Take the changes of several files, at most one of each. Yield batches of events about blocks that have come
        or gone.
        """
        new, left, gone = list[int](), list[int](), list[int]()
        for change in changes:
            chain = self._chains.pop(change.file, [])
            left += chain[change.num_kept :]
            del chain[change.num_kept :]
            for tokens in change.pages:
                parent = chain[-1] if chain else None
                name = _hash(parent, tokens)
                block = self._blocks.get(name)
                if block is None:
                    block = self._blocks[name] = _Block(parent, tokens.tobytes())
                    new.append(name)
                block.num_files += 1
                chain.append(name)
            if chain:
                self._chains[change.file] = chain
        for name in reversed(left):
            self._blocks[name].num_files -= 1
            if not self._blocks[name].num_files:
                del self._blocks[name]
                gone.append(name)
        yield from self._stored(new)
        for part in _parts(gone):
            yield _batch([["BlockRemoved", part, None]])

    def snapshot(self) -> Iterator[bytes]:
        """Yield batches of events after which a subscriber knows all blocks, whatever it knew before."""
        yield _batch([["AllBlocksCleared"]])
        yield from self._stored([*self._blocks])

    def _stored(self, names: list[int]) -> Iterator[bytes]:
        """Yield batches of events for these blocks. Consecutive blocks of a file are one event."""
        for part in _parts(names):
            events = list[list[Any]]()
            last = None
            for name in part:
                block = self._blocks[name]
                tokens = np.frombuffer(block.tokens, np.int32).tolist()
                if last is None or block.parent != last:
                    events.append(["BlockStored", [], block.parent, [], PAGE_ENTRIES, None, None, None])
                events[-1][1].append(name)
                events[-1][3] += tokens
                last = name
            yield _batch(events)


def _parts(names: list[int]) -> Iterator[list[int]]:
    for begin in range(0, len(names), BLOCKS_A_BATCH):
        yield names[begin : begin + BLOCKS_A_BATCH]


def _hash(parent: int | None, tokens: IntArray) -> int:
    """Return a number below 2^63, which every decoder can hold."""
    before = b"" if parent is None else parent.to_bytes(8)
    return int.from_bytes(blake2b(before + tokens.tobytes(), digest_size=8).digest()) >> 1


def _batch(events: list[list[Any]]) -> bytes:
    batch: bytes = msgpack.packb([time.time(), events, 0])
    return batch
