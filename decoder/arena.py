"""The KV arena: every page of the pool in one array that costs memory only where it has been touched."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from decoder.config import ModelConfig
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid

_MAP_NORESERVE = 0x4000
"""Linux's number; the mmap module of Python 3.11 does not have the name."""


class Arena:
    """`num_pages` pages of float32 KV, addressed by number.

    A page is `[layers, 2, kv_heads, 32 * head_dim]`. For each layer and KV head, the K block is
    `[head_dim][32]` (so that a score of 32 entries is one chain of vector multiply-adds) and the V
    block is `[32][head_dim]`. The memory is mapped without reservation: a large pool is free until
    it is used.
    """

    layout = "k=dim,entry v=entry,dim"

    def __init__(self, config: ModelConfig, num_pages: int, dtype: str = "F32") -> None:
        if dtype != "F32":
            raise Invalid(f"arena dtype {dtype!r} is not supported on the CPU: use 'F32'")
        if num_pages < 1:
            raise Invalid(f"an arena of {num_pages} pages cannot hold anything: give it at least 1")
        self._config = config
        self._num_pages = num_pages
        self._page_bytes = PAGE_ENTRIES * config.entry_bytes(dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, num_pages * self._page_bytes, flags=flags)
        self._bytes = memoryview(self._map)
        self.pages: npt.NDArray[np.float32] = np.frombuffer(self._map, dtype=np.float32).reshape(
            num_pages, *config.page_shape
        )

    @property
    def dtype(self) -> str:
        """The safetensors name of the element type."""
        return "F32"

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def view(self, page: int, count: int = 1) -> memoryview:
        """The bytes of `count` consecutive pages, writable, without a copy."""
        assert 0 <= page <= page + count <= self._num_pages, (page, count, self._num_pages)
        return self._bytes[page * self._page_bytes : (page + count) * self._page_bytes]

    def copy(self, source: int, target: int) -> None:
        """Copy one whole page."""
        self.view(target)[:] = self.view(source)

    def zero(self, page: int) -> None:
        """Fill one page with zeros."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        self.pages[page] = 0.0

    def head(self, page: int, num_entries: int) -> bytes:
        """A copy of a page in which every slot from `num_entries` on reads as zero."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        assert 0 <= num_entries <= PAGE_ENTRIES, num_entries
        config = self._config
        copied = self.pages[page].copy()
        keys = copied[:, 0].reshape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_ENTRIES)
        values = copied[:, 1].reshape(config.num_layers, config.num_kv_heads, PAGE_ENTRIES, config.head_dim)
        keys[..., num_entries:] = 0.0
        values[..., num_entries:, :] = 0.0
        head: bytes = copied.tobytes()
        return head
