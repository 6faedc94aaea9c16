"""Facts about a model that its images state. `Facts` satisfies the file system's protocol `ModelFacts`."""

from __future__ import annotations

from typing import Protocol

from decoder.model import Model


class KvFormat(Protocol):
    """Format of the pages in an arena."""

    @property
    def dtype(self) -> str:
        """The safetensors name of the element type."""
        ...

    @property
    def layout(self) -> str:
        """The order of the numbers of K and V within a page."""
        ...


class Facts:
    """Facts about a model, the arena of its KV, and the precision of its arithmetic."""

    __slots__ = ("_arena", "_model", "identity")

    def __init__(self, model: Model, arena: KvFormat, precision: str) -> None:
        self._model = model
        self._arena = arena
        self.identity = {**model.identity, "precision": precision, "layout": arena.layout}
        """Facts that an image must state with the same values. Otherwise the daemon cannot use the image's KV."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Return `(layers, 2, kv_heads, 32 * head_dim)`."""
        return self._model.config.page_shape

    @property
    def dtype(self) -> str:
        """Return the safetensors name of the arena's element type."""
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
