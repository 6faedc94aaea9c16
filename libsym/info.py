"""Facts that the daemon tells about the model and about files: JSON on the wire, frozen dataclasses here.

A newer daemon may say more than this library knows: a key without a field is kept in `extra`, or left out.
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
    """Tokens that stand for no text, though they are spelled out as some: marks of turns, the ends."""
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Settings that the model's makers draw tokens with, for `Sampler(**sampling)`; empty where they name none."""
    dtype: str = ""
    """Of the KV cache, as safetensors writes it."""
    page_entries: int = 0
    entry_bytes: int = 0
    """KV bytes that one token costs."""
    backend: str = ""
    mount: str = ""
    """Where the KV files are mounted."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Facts that a newer daemon tells beyond these."""

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        known, extra = split_known(cls, text)
        for name in ("eos_ids", "special_ids"):
            known[name] = frozenset(known.get(name, ()))
        return cls(**known, extra=extra)


@dataclass(frozen=True, slots=True)
class KvStat:
    """Facts of a file that are known without reading it.

    `exclusive_pages`, `pinned`, `lease_s`, `ttl_s`, `priority`, `tier`, `memory_pages` and `turns` are None to a
    program that may not read the file.

    >>> kv = sym.kv_create()
    >>> length = sym.kv_write(kv, [1] * 33)
    >>> sym.kv_stat(kv).tokens, sym.kv_stat(kv).pages
    (33, 2)
    """

    kind: str
    """kv, file, dir, link, or as the daemon names it."""
    tokens: int = 0
    size: int = 0
    """Bytes of the image, for a KV file."""
    pages: int = 0
    exclusive_pages: int | None = 0
    """Pages that no other file shares: what removing it would free."""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    ino: int = 0
    nlink: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    pinned: bool | None = False
    """The file does not expire, and stays in memory: see `kv_advise`."""
    lease_s: float | None = 0.0
    """Seconds after which it is not pinned any more; 0: it is for good, or not at all."""
    ttl_s: float | None = 0.0
    """Seconds from the last use of the file to its removal; 0: never."""
    priority: int | None = 0
    lost_tokens: int = 0
    """Entries that it had when a daemon ended, and that were not on disk: it came back shorter. 0 once it is cut, be
    it to the length that it has."""
    tier: str | None = ""
    """Where the pages of a KV file are: memory, disk (and nowhere in memory), or mixed."""
    memory_pages: int | None = 0
    """Pages of the file that are in memory."""
    other_bits: int = 0
    """First entries of the file, up to the last that another instruction set or kind of device computed: other bits
    than this daemon's."""
    turns: Sequence[int] | None = ()
    """The lengths that the file had before the last turns of the conversation in it, 64 at most, as far as is known."""

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**split_known(cls, text)[0])


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A name in a directory.

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
    """A KV file that is used, as `kv_hot` tells of it.

    >>> sym.kv_create("a.kv").close()
    >>> [(file.path, file.hits, file.pinned) for file in sym.kv_hot()]
    [('a.kv', 0, False)]
    """

    path: str
    """From the root of the mount, or of the domain that the connection is confined to; of several names, one."""
    tokens: int = 0
    size: int = 0
    """Bytes of the image."""
    pages: int = 0
    exclusive_pages: int = 0
    """Pages that no other file shares: what removing it would free."""
    uid: int = 0
    pinned: bool = False
    hits: int = 0
    """Times that the file was opened, forked or read since the daemon began."""
    opens: int = 0
    """By how many it is open now: handles of programs, open files of the mount."""
    heat: float = 0.0
    """Share of the last minutes with uses of the file, 0 to 1; a minute ago counts half, two minutes one quarter."""
    idle_s: float = 0.0
    """Seconds since its last use."""
    page_bytes: int = 0
    """Of each page: those of another model have another size. 0: the daemon is of an earlier release."""


def split_known(cls: type[Any], text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """A JSON object as (what `cls` has fields for, the rest). The names it cannot do without must be there."""
    return split_object(cls, parse(text))


def split_object(cls: type[Any], found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(found, dict):
        raise ProtocolError(
            f"the daemon described a {cls.__name__} as {type(found).__name__}: use one release for both"
        )
    names = {each.name for each in fields(cls)} - {"extra"}
    return {k: v for k, v in found.items() if k in names}, {k: v for k, v in found.items() if k not in names}


def parse(text: bytes) -> Any:
    """The daemon's JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"the daemon answered with something that is not JSON: {error}") from error
