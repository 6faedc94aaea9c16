"""What the file system needs from others, declared here so that it never meets a tensor.

`PageStore` is satisfied by the decoder's arena and `ModelFacts` by the loaded model, both by structure;
`symphony` wires them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvfs.free_list import IntArray


class PageStore(Protocol):
    """Pages of KV by number: `num_pages` blobs of `page_bytes` each, laid out one after the other."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def view(self, page: int, count: int = 1) -> memoryview:
        """The bytes of `count` consecutive pages as they are now, to be read, without a copy.

        What a page holds below its table's end stays good as long as somebody refers to the page.
        """
        ...

    def writable(self, page: int) -> memoryview:
        """The bytes of one page that nobody else knows, to be overwritten whole."""
        ...

    def zero(self, page: int) -> None:
        """Fill one page with zeros."""
        ...

    def head(self, page: int, num_entries: int) -> bytes:
        """A copy of a page in which every slot from `num_entries` on reads as zero."""
        ...

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: its slot i becomes slot `slots[i]` of page `sources[i]`, moved up by `shifts[i]` positions.

        Slots past the last read as zero. For worker threads: no other page changes.
        """
        ...


class ModelFacts(Protocol):
    """What an image says about the model whose KV it holds."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2, kv_heads, 32 * head_dim)`."""
        ...

    @property
    def dtype(self) -> str:
        """The safetensors name of the arena's element type: `F32`, `BF16`."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def name(self) -> str:
        """The model's name for people."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints that must be equal for KV to be usable: model, tokenizer, rope, precision, layout."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...
