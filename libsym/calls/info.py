"""Facts about the model and about files: JSON in replies, and frozen dataclasses for programs.

A newer daemon may send keys that this library does not know. These keys are kept in `extra`, or dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from libsym.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that the daemon serves.

    >>> info = sym.model_info()
    >>> info.name, info.vocab_size, info.max_positions, sorted(info.special_ids - info.eos_ids)
    ('tiny', 259, 4096, [256, 258])
    """

    name: str
    vocab_size: int
    architecture: str = ""
    max_positions: int = 0
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text or a turn."""
    special_ids: frozenset[int] = frozenset()
    """Control tokens, such as marks of turns and end tokens. Each has a spelling, such as `<eos>`, but is not text."""
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Settings that the model's makers recommend, for `Sampler(**sampling)`. Empty: the makers recommend no settings.
    """
    dtype: str = ""
    """Type of the numbers in the KV cache, by its name in safetensors."""
    page_entries: int = 0
    entry_bytes: int = 0
    """Bytes of K and V for one token."""
    backend: str = ""
    mount: str = ""
    """Mount point of the KV files."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further facts, from a daemon that is newer than this library."""

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        known, extra = split_known(cls, text)
        for name in ("eos_ids", "special_ids"):
            known[name] = frozenset(known.get(name, ()))
        return cls(**known, extra=extra)


@dataclass(frozen=True, slots=True)
class KvStat:
    """Facts about a file, as `kv_stat` returns them.

    `exclusive_pages`, `pinned`, `lease_s`, `ttl_s`, `priority`, `tier`, `memory_pages` and `turns` are None if the
    program may not read the file.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [1] * 33)
    >>> sym.kv_stat(kv).tokens, sym.kv_stat(kv).pages
    (33, 2)
    """

    kind: str
    """kv, file, dir, link, or another name that the daemon gives."""
    tokens: int = 0
    size: int = 0
    """Size in bytes. For a KV file, the size of its image."""
    pages: int = 0
    exclusive_pages: int | None = 0
    """Pages that no other file shares: removing the file frees them."""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    ino: int = 0
    nlink: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    pinned: bool | None = False
    """Whether the file is pinned: it does not expire, and stays in memory. See `kv_advise`."""
    lease_s: float | None = 0.0
    """Seconds until the lease ends. 0: the file is pinned without a lease, or not pinned."""
    ttl_s: float | None = 0.0
    """Seconds from the last use of the file to its removal. 0: never."""
    priority: int | None = 0
    lost_tokens: int = 0
    """Number of entries that the file lost because they were not on disk when a daemon ended. Any truncation sets this
    number to 0, even a truncation to the file's present length.
    """
    tier: str | None = ""
    """Place of the pages of a KV file: memory, disk (no page in memory), or mixed."""
    memory_pages: int | None = 0
    """Pages of the file that are in memory."""
    other_bits: int = 0
    """Number of entries from the beginning of the file to the last entry that another instruction set or kind of device
    computed. This daemon would compute those entries with other bits.
    """
    turns: Sequence[int] | None = ()
    """Length of the file before each of the last turns of its conversation, as far as known. At most 64 turns are
    known.
    """

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**split_known(cls, text)[0])


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A name in a directory, as `kv_list` lists it.

    >>> sym.kv_create("a.kv").close()
    >>> [(entry.name, entry.kind, entry.tokens) for entry in sym.kv_list()]
    [('a.kv', 'kv', 0)]
    """

    name: str
    kind: str
    size: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class HotFile:
    """A KV file and its use, as `kv_hot` lists it.

    >>> sym.kv_create("a.kv").close()
    >>> [(file.path, file.hits, file.pinned) for file in sym.kv_hot()]
    [('a.kv', 0, False)]
    """

    path: str
    """A path of the file, from the root of the mount or of the connection's domain. The file may have other names."""
    tokens: int = 0
    size: int = 0
    """Bytes of the image."""
    pages: int = 0
    exclusive_pages: int = 0
    """Pages that no other file shares: removing the file frees them."""
    uid: int = 0
    pinned: bool = False
    hits: int = 0
    """Number of times that the file was opened, forked or read since the daemon began."""
    opens: int = 0
    """Number of handles of programs, and of open files on the mount, that have the file open now."""
    heat: float = 0.0
    """Fraction of recent time in which the file was used, from 0 to 1. Use a minute ago counts half, and use two
    minutes ago a quarter.
    """
    idle_s: float = 0.0
    """Seconds since the last use of the file."""
    page_bytes: int = 0
    """Bytes of each page. Pages of another model have another size. 0: the daemon is of an earlier release."""


def split_known(cls: type[Any], text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a JSON object into the fields of `cls` and the rest. ProtocolError: the JSON is not an object."""
    return split_object(cls, parse(text))


def split_object(cls: type[Any], found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(found, dict):
        raise ProtocolError(
            f"the daemon described a {cls.__name__} as {type(found).__name__}: use one release for both"
        )
    names = {each.name for each in fields(cls)} - {"extra"}
    return {k: v for k, v in found.items() if k in names}, {k: v for k, v in found.items() if k not in names}


def parse(text: bytes) -> Any:
    """Parse JSON from the daemon. ProtocolError: it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"the daemon answered with something that is not JSON: {error}") from error
