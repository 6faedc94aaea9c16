"""The image of a KV file: the bytes that `read(2)` gives, a safetensors file with a fixed layout.

    offset              bytes            content
    0                   8                header length, little-endian
    8                   data_start - 8   header: JSON, padded with spaces
    data_start          P * page_bytes   tensor `pages` [P, layers, 2, kv_heads, 32 * head_dim], P = ceil(n / 32)
    ...                 4 * n            tensor `tokens` [n], I32 little-endian
    ...                 4 * n            tensor `positions` [n], I32 little-endian

`data_start` is a multiple of 4096. It depends only on the model, not on the number of entries n. So arithmetic gives
the size of an image, and a page of the image equals the page of the pool, byte for byte. Entries of the last page past
n are zeros.

`__metadata__` holds the format's name and version, the model's identity, a digest, and where the last turns of a
conversation begin. `turns` has 64 records of 16 bytes, in hexadecimal digits; missing records are zeros. Images of
version 1, which have no turns, are still read. The digest is BLAKE2b-256 over the BLAKE2b-256 digests of the pages in
order, then the bytes of `tokens`, then those of `positions`. The digest detects damage, but does not prove who made the
image.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

import numpy as np

from kvfs.images.model_facts import ModelFacts
from kvfs.pages.pool import pages_for
from kvfs.pages.turns import padded
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid

FORMAT_NAME = "symphony.kv"
FORMAT_VERSION = "2"
TENSORS = ("pages", "tokens", "positions")

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
"""Bytes of an element, by the type's name in safetensors."""

_INFINITY = {"F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7F}
"""The bits of plus infinity. F8_E4M3 has no infinity; here its NaN, the largest bit pattern, stands for it."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 16
"""Limit for the header: eight times its present size. The limit bounds how much of a hostile file is parsed."""

CLAIM_BYTES = 4096
"""How many bytes of a file's start `claims_to_be_image` needs."""

_ALIGNMENT = 4096
_CLAIM = re.compile(rb'"format"\s*:\s*"' + re.escape(FORMAT_NAME.encode()) + rb'"')
_MANY_ENTRIES = 1 << 48
"""More entries than any file will have. The header is long enough for numbers of this size."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Offsets of the parts of an image, in bytes from its start."""

    num_entries: int
    num_pages: int
    pages: int
    tokens: int
    positions: int
    size: int


class ImageFormat:
    """The images of one model: sizes, offsets and headers."""

    __slots__ = ("data_start", "dtype", "facts", "identity", "page_bytes", "page_shape", "version")

    def __init__(self, facts: ModelFacts, version: str = FORMAT_VERSION) -> None:
        self.version = version
        self.facts = facts
        self.identity = dict(facts.identity)
        assert not self.identity.keys() & {"format", "version", "digest", "turns"}
        self.dtype = facts.dtype
        self.page_shape = facts.page_shape
        self.page_bytes = math.prod(facts.page_shape) * ITEM_BYTES[facts.dtype]
        self.data_start = 0  # set below, once the longest header is known
        longest = LENGTH_BYTES + len(self._json(_MANY_ENTRIES, "0" * 64, b""))
        self.data_start = -(-longest // _ALIGNMENT) * _ALIGNMENT
        assert self.data_start - LENGTH_BYTES <= MAX_HEADER_BYTES, f"a header of {longest} bytes: identity too long"

    def layout(self, num_entries: int) -> ImageLayout:
        num_pages = pages_for(num_entries)
        tokens = self.data_start + num_pages * self.page_bytes
        positions = tokens + 4 * num_entries
        return ImageLayout(num_entries, num_pages, self.data_start, tokens, positions, positions + 4 * num_entries)

    def image_bytes(self, num_entries: int) -> int:
        """Return the size of an image of `num_entries`."""
        return self.layout(num_entries).size

    def entries_for(self, size: int) -> int:
        """Return how many entries fit into an image of `size` bytes. `truncate(2)` keeps this many."""
        room = size - self.data_start
        if room < 0:
            raise Invalid(
                f"can't truncate a KV file to {size} bytes: its header alone has {self.data_start}; 0 empties the file"
            )
        full_pages, rest = divmod(room, self.page_bytes + 8 * PAGE_ENTRIES)
        return full_pages * PAGE_ENTRIES + max(0, rest - self.page_bytes) // 8

    @property
    def has_turns(self) -> bool:
        return self.version != "1"

    def header(self, num_entries: int, digest: str, turns: bytes = b"") -> bytes:
        """Return the first `data_start` bytes of an image."""
        text = self._json(num_entries, digest, turns)
        length = self.data_start - LENGTH_BYTES
        assert len(text) <= length
        return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

    def tensor_table(self, num_entries: int) -> dict[str, dict[str, object]]:
        """Return the header's entries for the tensors; offsets count from `data_start`."""
        at = self.layout(num_entries)
        return {
            "pages": self._tensor(self.dtype, [at.num_pages, *self.page_shape], at.pages, at.tokens),
            "tokens": self._tensor("I32", [num_entries], at.tokens, at.positions),
            "positions": self._tensor("I32", [num_entries], at.positions, at.size),
        }

    def _tensor(self, dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin - self.data_start, end - self.data_start]}

    def _json(self, num_entries: int, digest: str, turns: bytes) -> bytes:
        metadata = {"format": FORMAT_NAME, "version": self.version, **self.identity, "digest": digest}
        if self.has_turns:
            metadata["turns"] = padded(turns).hex()
        header = {"__metadata__": metadata, **self.tensor_table(num_entries)}
        return json.dumps(header, separators=(",", ":")).encode()


def all_finite(page: memoryview, dtype: str) -> bool:
    """Return whether every number of a page is finite.

    The bits of the numbers are compared as integers. As signed integers, infinity and positive NaNs are the largest. As
    unsigned integers, -infinity and negative NaNs are the largest. So two maxima decide. This test is 30 times as fast
    as the page's digest, and converts nothing.
    """
    infinity, item_bytes = _INFINITY[dtype], ITEM_BYTES[dtype]
    signed = np.frombuffer(page, f"<i{item_bytes}")
    unsigned = signed.view(f"<u{item_bytes}")
    sign = 1 << (8 * item_bytes - 1)
    return int(signed.max()) < infinity and int(unsigned.max()) < sign | infinity


def claims_to_be_image(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes claims to be an image of ours. `head` has its first CLAIM_BYTES.

    A claim is not a proof: the file may be cut short or wrong. A file without a claim is a plain file. Safetensors
    files of other tools are plain files too.
    """
    if size <= LENGTH_BYTES or len(head) <= LENGTH_BYTES:
        return False
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    header = head[LENGTH_BYTES : LENGTH_BYTES + length]
    return length <= MAX_HEADER_BYTES and header.startswith(b"{") and _CLAIM.search(header) is not None
