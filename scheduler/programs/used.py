"""Usage of a program, a user, or a domain. Usage is counted when it occurs, and never reduced."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(slots=True)
class Used:
    """Counters that only grow. Summed over all programs, `tokens` counts what the decoder has computed."""

    calls: int = 0
    """Calls of `pred` and of other operations that run the model. Abandoned calls count."""
    failed_calls: int = 0
    tokens: int = 0
    """Computed tokens, including tokens of calls that failed or were abandoned."""
    rejected_tokens: int = 0
    """Computed and rejected tokens of drafts. No file contains such tokens."""
    tokens_in: int = 0
    """Tokens that programs passed to calls that succeeded."""
    tokens_out: int = 0
    """Tokens in the answers to these calls: generated tokens, and rows, since a program can draw a token from a row."""
    steps: int = 0
    """Steps, each counted once for every call that it computed."""
    queue_s: float = 0.0
    compute_s: float = 0.0
    page_seconds: float = 0.0
    """Page-seconds. For a user, the number dates from the last sweep over its programs."""
    bytes_in: int = 0
    """Bytes of requests in the rings. Tokens and logits elsewhere in the shared region are not counted."""
    bytes_out: int = 0

    @classmethod
    def read(cls, found: Any) -> Self:
        """Return the usage that `facts` wrote to a file. ValueError: the value is not a usage."""
        read = cls()
        if not isinstance(found, dict) or not found.keys() <= set(_NAMES):
            raise ValueError(f"{found!r} is no usage")
        for name, value in found.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
                raise ValueError(f"{name} is {value!r}")
            setattr(read, name, type(getattr(read, name))(value))
        return read

    def facts(self) -> dict[str, Any]:
        """Return the counters by name, for replies and files."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Used))
