"""Contents of a file, and the parts of them that a crash may leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile


@dataclass(frozen=True, slots=True)
class Entries:
    """Contents of a KV file."""

    tokens: tuple[int, ...]
    lost: int
    """Entries that it is said to have lost."""

    def __str__(self) -> str:
        ends = f", {self.tokens[0]}…{self.tokens[-1]}" if self.tokens else ""
        return f"{len(self.tokens)} entries{ends}" + (f", {self.lost} lost" if self.lost else "")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Contents of a plain file."""

    data: bytes

    def __str__(self) -> str:
        return f"{len(self.data)} bytes, {self.data[:8].hex()}…{self.data[-8:].hex()}"


Content: TypeAlias = Entries | Bytes | None
"""None: it is no regular file."""


def content_of(inode: Inode) -> Content:
    match inode.content:
        case KvFile() as kv:
            return Entries(tuple(kv.table.read()[0].tolist()), kv.lost)
        case PlainFile() as plain:
            return Bytes(plain.read_at(0, plain.size))
    return None


def length_of(content: Content) -> int:
    """How many entries."""
    return len(content.tokens) if isinstance(content, Entries) else 0


def is_prefix(found: Content, state: Content) -> bool:
    """Whether a file that was so may come back so: what is missing is counted."""
    if not isinstance(found, Entries) or not isinstance(state, Entries):
        return found is state
    length = len(found.tokens)
    return found.tokens == state.tokens[:length] and length + found.lost == len(state.tokens) + state.lost


def may_be_left(found: Bytes, states: Sequence[Content]) -> bool:
    """Whether a plain file may come back so that was in all these states since it was synced."""
    sizes = [len(state.data) if isinstance(state, Bytes) else 0 for state in states]
    size, least = len(found.data), min(sizes)
    if not any(isinstance(state, Bytes) for state in states) or not least <= size <= max(sizes):
        return False
    if not least:
        return True
    every = np.array([np.frombuffer(state.data[:least], np.uint8) for state in states if isinstance(state, Bytes)])
    is_unchanged = (every == every[0]).all(axis=0)
    return bool((np.frombuffer(found.data[:least], np.uint8) == every[0])[is_unchanged].all())
