"""Where KV is while a workload is replayed: pages in memory and on disk, by segment; what goes and what comes back.

A turn has all pages that it needs in memory, or waits for them and holds none. While it goes on they stay. Room is made
by the policy under trial: from the segments that nobody needs now, worth least first, from each its last pages first.
What was never written is written first. The disk reads and writes at its rates, at once, each in order.

Without tiers what goes is gone: it is computed again by whoever needs it, and one that needs it just then has it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfs.tiers.policy import Files, Gaps, Rank
from libsym.abi import PAGE_ENTRIES
from symphony.policy.machine import Machine, pages_of
from symphony.policy.segments import Segment
from symphony.policy.workload import Turn

_WEIGHT = 0.25
"""Of the last gap in the mean of a file's gaps."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a turn begins with."""

    ready_s: float
    """When its pages are in memory: now, if none was missing."""
    num_compute: int
    """Entries, beside its own new ones, that have to be computed."""
    num_again: int
    """Of them, those that had been computed before."""


class Memory:
    """`rank`: None: there are no tiers."""

    def __init__(self, segments: Sequence[Segment], num_frames: int, machine: Machine, rank: Rank | None) -> None:
        count = len(segments)
        self._machine, self._rank = machine, rank
        self._start = np.array([each.start for each in segments], np.int64)
        self._size = np.array([each.size for each in segments], np.int64)
        self._has = np.array([each.num_initial for each in segments] if rank else [0] * count, np.int64)
        """Entries that are computed and not lost."""
        self._ever = self._has.copy()
        self._resident = np.zeros(count, np.int64)
        """Pages in memory: the first ones of each."""
        self._kept = pages_of(self._has.astype(float)).astype(np.int64)
        """Pages on disk: the first ones, as they are now."""
        self._users = np.zeros(count, np.int64)
        """Turns that need it now."""
        self._ended_s = np.zeros(count)
        self._num_uses = np.zeros(count)
        self._gap_s, self._spread_s = np.full(count, np.nan), np.full(count, np.nan)
        self._priority = np.zeros(count, np.int64)
        self._here_s = np.zeros(count)
        """When what is on its way to memory is there."""
        self._gaps = Gaps()
        self._read_free_s = self._write_free_s = 0.0
        self.num_frames = num_frames
        self.num_free = num_frames
        self.most_used = 0
        self.num_in = self.num_out = self.num_decisions = 0
        """Pages read and written, and how often the policy was asked."""

    def take(self, turn: Turn, now_s: float) -> Taken | None:
        """Everything that it needs from now until its end. None: there is no room."""
        chain = np.array(turn.chain, np.intp)
        needs = np.minimum(turn.after - self._start[chain], self._size[chain])
        before = np.clip(turn.before - self._start[chain], 0, self._size[chain])
        missing = np.maximum(pages_of(needs.astype(float)).astype(np.int64) - self._resident[chain], 0)
        self._users[chain] += 1
        ready_s = self._make_room(int(missing.sum()) - self.num_free, now_s)
        if ready_s is None:
            self._users[chain] -= 1
            return None
        self._note_begin(chain, now_s, turn.priority)
        had_pages = pages_of(np.minimum(self._has[chain], before).astype(float)).astype(np.int64)
        brought = int(np.maximum(had_pages - self._resident[chain], 0).sum()) if self._rank else 0
        if brought:
            self.num_in += brought
            pages_s = brought * self._machine.page_bytes / self._machine.read_bytes_s
            self._read_free_s = max(now_s, self._read_free_s) + self._machine.latency_s + pages_s
            self._here_s[chain[had_pages > self._resident[chain]]] = self._read_free_s
        self._resident[chain] += missing
        self.num_free -= int(missing.sum())
        self.most_used = max(self.most_used, self.num_frames - self.num_free)
        compute = np.maximum(before - self._has[chain], 0)
        again = np.maximum(np.minimum(before, self._ever[chain]) - self._has[chain], 0)
        changed = np.maximum(before, self._has[chain])
        grown = chain[needs > self._has[chain]]
        self._kept[grown] = np.minimum(self._kept[grown], self._has[grown] // PAGE_ENTRIES)  # a page that gets entries
        self._has[chain] = changed
        self._ever[chain] = np.maximum(self._ever[chain], changed)
        return Taken(max(ready_s, float(self._here_s[chain].max(initial=0))), int(compute.sum()), int(again.sum()))

    def give_back(self, turn: Turn, now_s: float) -> None:
        """It is over: its file has grown."""
        chain = np.array(turn.chain, np.intp)
        needs = np.minimum(turn.after - self._start[chain], self._size[chain])
        self._has[chain] = np.maximum(self._has[chain], needs)
        self._ever[chain] = np.maximum(self._ever[chain], needs)
        self._users[chain] -= 1
        done = chain[self._users[chain] == 0]
        self._ended_s[done] = now_s
        self._num_uses[done] += 1

    def drop(self, segment: int) -> None:
        """Nobody will need it, and it has no name."""
        self.num_free += int(self._resident[segment])
        self._resident[segment] = self._has[segment] = self._kept[segment] = 0

    def is_here(self, turn: Turn) -> bool:
        """Whether all that its file has is in memory."""
        chain = list(turn.chain)
        before = np.clip(turn.before - self._start[chain], 0, self._size[chain])
        return bool((pages_of(before.astype(float)) <= self._resident[chain]).all())

    def has_any(self, turn: Turn) -> bool:
        """Whether some entry of its file has been computed: it is a resume."""
        return bool((self._ever[list(turn.chain)] > 0).any())

    def _note_begin(self, chain: np.ndarray[tuple[int], np.dtype[np.intp]], now_s: float, priority: int) -> None:
        fresh = chain[self._users[chain] == 1]
        self._priority[fresh] = priority
        used = fresh[self._num_uses[fresh] > 0]
        gaps_s = now_s - self._ended_s[used]
        for gap_s in gaps_s.tolist():
            self._gaps.add(gap_s)
        means, spreads = self._gap_s[used], self._spread_s[used]
        away = np.where(np.isnan(means), np.nan, np.abs(gaps_s - means))
        self._spread_s[used] = np.where(np.isnan(spreads), away, spreads + _WEIGHT * (away - spreads))
        self._gap_s[used] = np.where(np.isnan(means), gaps_s, means + _WEIGHT * (gaps_s - means))

    def _make_room(self, num_pages: int, now_s: float) -> float | None:
        """When there are so many more free frames. None: those who may go do not have them."""
        if num_pages <= 0:
            return now_s
        may_go = np.flatnonzero((self._users == 0) & (self._resident > 0))
        resident = self._resident[may_go]
        if resident.sum() < num_pages:
            return None
        self.num_decisions += 1
        worth = self._worth(may_go, now_s)
        order = np.lexsort((worth, self._priority[may_go]))
        victims, pages = may_go[order], resident[order]
        total = np.cumsum(pages)
        count = int(np.searchsorted(total, num_pages)) + 1
        victims, gone = victims[:count], pages[:count].copy()
        gone[-1] -= total[count - 1] - num_pages
        self._resident[victims] -= gone
        self.num_free += num_pages
        if self._rank is None:
            self._has[victims] = np.minimum(self._has[victims], self._resident[victims] * PAGE_ENTRIES)
            return now_s
        stays = np.maximum(self._resident[victims], self._kept[victims])
        written = np.maximum(self._resident[victims] + gone - stays, 0)
        self._kept[victims] = np.where(written > 0, stays + written, self._kept[victims])
        num_written = int(written.sum())
        if not num_written:
            return now_s
        self.num_out += num_written
        pages_s = num_written * self._machine.page_bytes / self._machine.write_bytes_s
        self._write_free_s = max(now_s, self._write_free_s) + self._machine.latency_s + pages_s
        return self._write_free_s

    def _worth(
        self, some: np.ndarray[tuple[int], np.dtype[np.intp]], now_s: float
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if self._rank is None:
            return self._ended_s[some]  # the ones that were used last stay
        pages = self._resident[some].astype(float)
        files = Files(
            num_pages=pages,
            idle_s=now_s - self._ended_s[some],
            num_uses=self._num_uses[some],
            gap_s=self._gap_s[some],
            gap_spread_s=self._spread_s[some],
            bring_s=self._machine.bring_s(pages),
            compute_s=self._machine.compute_s(self._has[some].astype(float), self._start[some].astype(float)),
            is_open=np.ones(len(some), np.bool_),
        )
        return self._rank(files, self._gaps)
