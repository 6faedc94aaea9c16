"""What an image says about the model whose KV it holds: `ModelFacts` of the file system, by structure."""

from __future__ import annotations

from typing import Protocol

from decoder.model import Model


class KvFormat(Protocol):
    """What an arena says about the pages in it."""

    @property
    def dtype(self) -> str:
        """The safetensors name of the element type."""
        ...

    @property
    def layout(self) -> str:
        """Where the numbers of K and V lie within a page."""
        ...


class Facts:
    """A model together with the arena that holds its KV and the precision that computed it."""

    __slots__ = ("_arena", "_model", "identity")

    def __init__(self, model: Model, arena: KvFormat, precision: str) -> None:
        self._model = model
        self._arena = arena
        self.identity = {**model.identity, "precision": precision, "layout": arena.layout}
        """Strings that must all be equal for KV to be usable."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2, kv_heads, 32 * head_dim)`."""
        return self._model.config.page_shape

    @property
    def dtype(self) -> str:
        """The safetensors name of the arena's element type."""
        return self._arena.dtype

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self._model.config.max_positions

    @property
    def name(self) -> str:
        return self._model.name
