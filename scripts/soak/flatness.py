"""Detection of leaks: the growth of a figure during a period without restarts, separated from noise.

A figure is read when the load has just ended, so that readings are comparable. The first quarter of the readings is
warm-up, in which caches, arenas and pools fill. For the other readings, the slope is the median of the slopes between
all pairs of readings (Theil-Sen). Up to 29 % of the readings may be arbitrarily wrong without effect. The growth is the
slope times the length of the period, and must be small. Even a small leak in each round adds up to a larger growth.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

WARM_UP = 4
"""Number of equal parts into which the readings are divided. The first part is the warm-up."""
MIN_LOOKS = 6
"""Least number of readings for a slope."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Limit on the change of a figure during a period."""

    most: float
    part: float = 0.0
    """Allowed growth as a share of the figure's typical value. The larger of `part` and `most` holds."""
    is_room: bool = False
    """Whether the figure counts free resources, so that a leak is a decrease."""

    def allows(self, growth: float, typical: float) -> bool:
        return (-growth if self.is_room else growth) <= max(self.most, self.part * typical)


def growth(looks: Sequence[float]) -> float:
    """Return the growth from the first reading to the last, by the median slope."""
    slopes = [(after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(looks), 2)]
    return statistics.median(slopes) * (len(looks) - 1)


def leaks(looks: Sequence[Mapping[str, float]], bounds: Mapping[str, Bound]) -> list[str]:
    """Return messages about the figures that changed beyond their limits. Too few readings give no message."""
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
