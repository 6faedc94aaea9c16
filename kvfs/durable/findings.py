"""Findings of fsck and scrub, and the lines that report them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Function that is called with the number of bytes read so far, and the number of all bytes to read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect or a leftover that fsck or scrub found."""

    kind: str
    """The kind of finding, as a word that scripts can read: see symphony(1)."""
    paths: tuple[str, ...]
    """Paths, below the mount, of all files and directories that the finding concerns. Of a file with many names, only
    some paths are listed.
    """
    what: str
    repair: str
    """The repair that --repair makes or has made. Empty: no repair is possible."""
    is_damage: bool = True
    """Whether the finding is damage. False: it is an ordinary leftover of a daemon that was killed."""

    def line(self, *, is_repaired: bool) -> str:
        """Return the line that reports the finding."""
        names = f"{listed(self.paths)}: " if self.paths else ""
        repair = f"; {'repaired: ' if is_repaired else '--repair: '}{self.repair}" if self.repair else ""
        return f"{names}{self.what}{repair}"


def what_is_left(length: int, full_length: int) -> str:
    """Return the text that says how many entries a damaged KV file still has. No repair restores lost entries."""
    return f"{length} of its {full_length} entries are left: see symphony help user.kv.lost"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return a text with the first names of a list and the number of the other names."""
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest
