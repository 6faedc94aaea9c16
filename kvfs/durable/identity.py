"""Facts of the model that computed the pages of a slot file. The facts are stored in the index and in the slot file.

With these facts alone, the daemon can list, move, export and remove files of another model or another precision.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Self

from kvfs.images.format import ITEM_BYTES
from kvfs.images.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class KeptFacts:
    """`ModelFacts` at the time when the pages were made."""

    page_shape: tuple[int, int, int, int]
    dtype: str
    vocab_size: int
    max_positions: int
    name: str
    identity: dict[str, str]

    @classmethod
    def of(cls, facts: ModelFacts) -> Self:
        return cls(
            facts.page_shape, facts.dtype, facts.vocab_size, facts.max_positions, facts.name, dict(facts.identity)
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        found = json.loads(text)
        return cls(**{**found, "page_shape": tuple(found["page_shape"])})

    def text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, separators=(",", ":"))  # fields in the same order as in images

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * ITEM_BYTES[self.dtype]

    def is_of(self, facts: ModelFacts) -> bool:
        """Return whether a model can use the pages as they are."""
        mine = (self.identity, self.dtype, self.page_shape)
        return mine == (dict(facts.identity), facts.dtype, tuple(facts.page_shape))
