"""What a search may still spend."""

from __future__ import annotations

import math
import time

from libsym.arguments import int64, real
from libsym.errors import Invalid
from libsym.usage import getrusage


class Budget:
    """Tokens that this program may compute from now on, and seconds that it may take: true while there is some left.

    >>> budget = sym.Budget(tokens=3)
    >>> length = sym.kv_write(sym.kv_create(), [65, 66])
    >>> budget.tokens_left, bool(budget), budget.seconds_left
    (1, True, None)

    It counts by `getrusage`, so what all threads and files of the program compute, and it stops nothing by itself: look
    before each branch, and give `max_tokens=budget.tokens_left`. (`symphony run --tokens` stops a program.)
    """

    __slots__ = ("_end_s", "_end_tokens")

    def __init__(self, tokens: int | None = None, seconds: float | None = None) -> None:
        if tokens is None and seconds is None:
            raise Invalid("Budget() takes tokens, seconds, or both")
        for name, value in (("tokens", tokens), ("seconds", seconds)):
            if value is not None and not real(value, name) >= 0:
                raise Invalid(f"Budget({name}={value}): 0 or more")
        self._end_tokens = None if tokens is None else getrusage().tokens + int64(tokens, "tokens")
        self._end_s = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def tokens_left(self) -> int | None:
        """How many tokens may still be computed; None: there is no bound."""
        return None if self._end_tokens is None else max(0, self._end_tokens - getrusage().tokens)

    @property
    def seconds_left(self) -> float | None:
        """None: there is no bound."""
        return None if self._end_s == math.inf else max(0.0, self._end_s - time.monotonic())

    def __bool__(self) -> bool:
        return self.tokens_left != 0 and self.seconds_left != 0

    def __repr__(self) -> str:
        parts = {"tokens": self.tokens_left, "s": self.seconds_left}
        return f"<Budget, left: {', '.join(f'{left:.6g} {unit}' for unit, left in parts.items() if left is not None)}>"
