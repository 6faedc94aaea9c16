"""A budget of tokens and seconds, for a search."""

from __future__ import annotations

import math
import time

from libsym.arguments import int64, real
from libsym.calls.usage import getrusage
from libsym.errors import Invalid


class Budget:
    """A limit on the tokens that this program computes from now on, on its time, or on both.

    A budget is true until its tokens or its time are used up.

    >>> budget = sym.Budget(tokens=3)
    >>> length = sym.kv_write(sym.kv_create(), [65, 66])
    >>> budget.tokens_left, bool(budget), budget.seconds_left
    (1, True, None)

    A budget counts with `getrusage`, so it counts the tokens of all threads and files of the program. A budget does not
    stop a call: test it before each branch, and pass `max_tokens=budget.tokens_left`. (`symphony run --tokens` stops a
    program.)
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
        """Number of tokens that may still be computed. None: no limit."""
        return None if self._end_tokens is None else max(0, self._end_tokens - getrusage().tokens)

    @property
    def seconds_left(self) -> float | None:
        """Number of seconds that are left. None: no limit."""
        return None if self._end_s == math.inf else max(0.0, self._end_s - time.monotonic())

    def __bool__(self) -> bool:
        return self.tokens_left != 0 and self.seconds_left != 0

    def __repr__(self) -> str:
        parts = {"tokens": self.tokens_left, "s": self.seconds_left}
        return f"<Budget, left: {', '.join(f'{left:.6g} {unit}' for unit, left in parts.items() if left is not None)}>"
