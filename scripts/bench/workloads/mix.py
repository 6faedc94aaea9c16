"""The mix: each of the others at a third of its size, all at once."""

from __future__ import annotations

import branches
import plain
import react
import shared
import structured
from kinds import Job, Words

SHARE = 1 / 3


def jobs(scale: float, words: Words) -> list[Job]:
    return [job for kind in (plain, shared, branches, react, structured) for job in kind.jobs(scale * SHARE, words)]
