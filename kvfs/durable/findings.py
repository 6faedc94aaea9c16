"""Findings of fsck and scrub, and the lines that report them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Is told of the bytes read, and of those to be read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect, or a leftover, that fsck or scrub found."""

    kind: str
    """A word for scripts: see symphony(1)."""
    paths: tuple[str, ...]
    """Every file, directory, … that it touches, as it is called below the mount; of a file with many names some."""
    what: str
    repair: str
    """The repair that --repair makes, or has made; empty: none."""
    is_damage: bool = True
    """No: an ordinary leftover of a daemon that was killed."""

    def line(self, *, is_repaired: bool) -> str:
        """For people."""
        names = f"{listed(self.paths)}: " if self.paths else ""
        repair = f"; {'repaired: ' if is_repaired else '--repair: '}{self.repair}" if self.repair else ""
        return f"{names}{self.what}{repair}"


def what_is_left(length: int, full_length: int) -> str:
    """Return the finding about a KV file that lost entries: no repair brings them back."""
    return f"{length} of its {full_length} entries are left: see symphony help user.kv.lost"


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names of a list, and how many others there are."""
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest
