"""What the programs of lips/ claim, in numbers: a module for each family of methods, run by scripts/bench/programs.py.

A module has `measure()`, which yields a Row for each figure. It calls the daemon that this process is connected to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `program` and what was measured of it, `value` in `unit`, beside `baseline` where it has one."""

    program: str
    what: str
    value: float
    unit: str
    baseline: float | None = None
