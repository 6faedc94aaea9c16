"""What a program has used, a user, or a domain: counted as it is used, and never taken back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(slots=True)
class Used:
    """Counters that only grow. The tokens of all programs together are those that the decoder has computed."""

    calls: int = 0
    """Of `pred` and what else runs the model, answered or given up."""
    failed_calls: int = 0
    tokens: int = 0
    """Computed, whatever became of them: also for calls that failed afterwards or were given up."""
    rejected_tokens: int = 0
    """Of these, the ones of drafts that turned out wrong: they are in no file."""
    tokens_in: int = 0
    """That calls gave which did not fail."""
    tokens_out: int = 0
    """That they were answered with: generated, or rows, which a token each was or could be drawn from."""
    steps: int = 0
    """That its calls were in; a step that holds two of them counts twice."""
    queue_s: float = 0.0
    compute_s: float = 0.0
    page_seconds: float = 0.0
    """Of a user: as it was when its programs were looked at last."""
    bytes_in: int = 0
    """Of requests, in the rings; tokens and rows of logits that lie elsewhere in the shared region are not counted."""
    bytes_out: int = 0

    @classmethod
    def read(cls, found: Any) -> Self:
        """What `facts` gave, from a file. ValueError: it is nothing of the kind."""
        read = cls()
        if not isinstance(found, dict) or not found.keys() <= set(_NAMES):
            raise ValueError(f"{found!r} is no usage")
        for name, value in found.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
                raise ValueError(f"{name} is {value!r}")
            setattr(read, name, type(getattr(read, name))(value))
        return read

    def facts(self) -> dict[str, Any]:
        """As programs and people are told."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Used))
