"""Whether a figure stays what it is: its growth over a stretch without restarts, told from noise.

A figure is looked at when the load has just ended, so that each look is like the one before. The first quarter is
warming up: caches, arenas and pools fill. Over the rest the slope is the median of the slopes between all pairs of
looks (Theil and Sen): a third of them may be off by anything, and it does not move. Growth is that slope times the
stretch's length. It has to be small, and a leak of a little at each round adds up to more than that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

WARM_UP = 4
"""One of so many looks is for warming up."""
MIN_LOOKS = 6
"""That a slope is told from."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a figure may grow over a stretch, or shrink."""

    most: float
    part: float = 0.0
    """Or this part of what it is, where that is more."""
    is_room: bool = False
    """What is free: it is lost as it shrinks."""

    def allows(self, growth: float, typical: float) -> bool:
        return (-growth if self.is_room else growth) <= max(self.most, self.part * typical)


def growth(looks: Sequence[float]) -> float:
    """From the first to the last of them, by the median slope."""
    slopes = [(after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(looks), 2)]
    return statistics.median(slopes) * (len(looks) - 1)


def leaks(looks: Sequence[Mapping[str, float]], bounds: Mapping[str, Bound]) -> list[str]:
    """What does not stay, in words; of a stretch that is too short, nothing."""
    warm = looks[len(looks) // WARM_UP :]
    if len(warm) < MIN_LOOKS:
        return []
    found = []
    for name, bound in bounds.items():
        values = [each[name] for each in warm]
        typical, grown = statistics.median(values), growth(values)
        if not bound.allows(grown, typical):
            found.append(f"{name} is {typical:g}, and changed by {grown:+.4g} in {len(values)} looks")
    return found
