"""The KV arena: one array of all pages. Linux allocates the memory of a page when it is first written."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from decoder.cpu._step import ffi, lib
from decoder.cpu.rebase import PageShape, Rebaser
from decoder.memory import advise_huge_pages
from decoder.model_config import ModelConfig
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid

_MAP_NORESERVE = 0x4000
"""Linux's value of MAP_NORESERVE, which the mmap module of Python 3.11 lacks."""


_NUMBERS: dict[str, tuple[type[np.generic], int, str, int]] = {
    "F32": (np.float32, 1, "k=dim,entry v=entry,dim", lib.SYM_FLOAT32),
    "BF16": (np.uint16, 2, "k=dim/2,entry,2 v=entry/2,dim,2", lib.SYM_BFLOAT16),
}
"""For each dtype: element, numbers side by side, layout, format in C."""


class Arena:
    """`num_pages` pages of KV, addressed by number.

    A page is `[layers, 2, kv_heads, 32 * head_dim]`. In float32, for each layer and KV head, the K block is
    `[head_dim][32]` (so that the scores of 32 entries are one chain of vector multiply-adds) and the V block is
    `[32][head_dim]`. In bfloat16 (stored as uint16), the numbers that one instruction multiplies and adds lie side by
    side: two dimensions of K, `[head_dim / 2][32][2]`, and two entries of V, `[16][head_dim][2]`. AMX reads
    this order as tiles. The memory is mapped without reservation, so unused pages cost nothing.
    """

    def __init__(self, config: ModelConfig, num_pages: int, dtype: str = "F32") -> None:
        if dtype not in _NUMBERS:
            raise Invalid(f"arena dtype {dtype!r} is not supported on the CPU: use {' or '.join(_NUMBERS)}")
        if num_pages < 1:
            raise Invalid(f"an arena of {num_pages} pages cannot hold anything: give it at least 1")
        element, together, layout, kv_format = _NUMBERS[dtype]
        self.dtype: str = dtype
        """The safetensors name of the element type."""
        self.layout: str = layout
        self._shape = PageShape(config, together)
        self._rebaser = Rebaser(config, self._shape)
        self._pages_of = ffi.new(
            "sym_shape *",
            {
                "layers": config.num_layers,
                "kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "kv_format": kv_format,
            },
        )
        self._num_pages = num_pages
        self._page_bytes = PAGE_ENTRIES * config.entry_bytes(dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, num_pages * self._page_bytes, flags=flags)
        # With small pages, each block of K (4 KiB or so) would need its own entry in the TLB.
        advise_huge_pages(self._map)
        self._bytes = memoryview(self._map)
        self.pages: npt.NDArray[Any] = np.frombuffer(self._map, dtype=element).reshape(num_pages, *config.page_shape)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def view(self, page: int, count: int = 1) -> memoryview:
        """Return the bytes of `count` consecutive pages, read-only, without a copy."""
        assert 0 <= page <= page + count <= self._num_pages, (page, count, self._num_pages)
        return self._bytes[page * self._page_bytes : (page + count) * self._page_bytes].toreadonly()

    def writable(self, page: int) -> memoryview:
        """Return the bytes of one page, to be overwritten."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        return self._bytes[page * self._page_bytes : (page + 1) * self._page_bytes]

    def zero(self, page: int) -> None:
        """Fill one page with zeros."""
        assert 0 <= page < self._num_pages, (page, self._num_pages)
        self.pages[page] = 0

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        """Return a copy of a page's bytes in which every entry from `num_entries` on is zero."""
        assert 0 <= num_entries <= PAGE_ENTRIES, num_entries
        copied = np.frombuffer(data, self.pages.dtype).reshape(self.pages.shape[1:]).copy()
        keys, values = self._shape.keys(copied), self._shape.values(copied)
        keys[..., num_entries:, :] = 0
        whole, odd = divmod(num_entries, self._shape.together)
        values[..., whole + bool(odd) :, :, :] = 0
        if odd:
            values[..., whole, :, odd:] = 0
        head: bytes = copied.tobytes()
        return head

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: copy entry `slots[i]` of page `sources[i]` to entry i, moved up by `shifts[i]` positions.

        The target is no source. All later entries of the page become zeros.
        """
        assert 0 <= target < self._num_pages, (target, self._num_pages)
        assert 0 < len(sources) == len(slots) == len(shifts) <= PAGE_ENTRIES, (sources, slots, shifts)
        assert 0 <= sources.min() <= sources.max() < self._num_pages, sources
        assert 0 <= slots.min() <= slots.max() < PAGE_ENTRIES, slots
        assert target not in sources, (target, sources)
        sources, slots = (np.ascontiguousarray(each, np.int32) for each in (sources, slots))
        lib.sym_gather(
            self._pages_of,
            ffi.from_buffer("char *", self._map),
            target,
            ffi.from_buffer("int32_t *", sources),
            ffi.from_buffer("int32_t *", slots),
            len(sources),
        )
        if shifts.any():
            self._rebaser.move(self.pages[target], shifts)
