"""Figures of the programs in lips/, with a module for each family of methods. scripts/bench/programs.py runs them.

`measure()` of a module yields a Row for each figure. This process must be connected to a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import libsym as sym

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A measured figure of a program: `value` in `unit`, and `baseline`, if there is a figure to compare with."""

    program: str
    what: str
    value: float
    unit: str
    baseline: float | None = None


def used(call: Callable[[], T]) -> tuple[T, int, int]:
    """Return the call's result, and the steps and tokens that the daemon computed for this process during the call."""
    before = sym.getrusage()
    result = call()
    after = sym.getrusage()
    return result, after.steps - before.steps, after.tokens - before.tokens
