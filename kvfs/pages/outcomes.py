"""Outcomes of the core's calls that no caller is to see."""

from __future__ import annotations

from kvfs._pages import lib


def done(outcome: int) -> None:
    """MemoryError, and nothing was changed. AssertionError: the core was given what can't be."""
    if outcome != lib.CORE_DONE:
        if outcome == lib.CORE_NO_MEMORY:
            raise MemoryError("no memory for the state of pages")
        raise AssertionError(f"the core was asked for what can't be: {outcome}")
