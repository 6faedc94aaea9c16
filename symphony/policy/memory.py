"""KV of a replay: the pages of each segment in memory and on disk, and their movement.

A turn gets all its pages together, or waits and holds no page. The pages stay in memory while the turn runs. If frames
are short, the policy under trial ranks the segments that no turn needs now. The segment of least worth is evicted
first, from its last page down. A page without a copy on disk is written before its eviction. The disk reads and writes
concurrently, at separate rates. Reads are served in their order, and so are writes.

Without tiers an evicted page is lost. The next turn that needs the page computes it again, and concurrent turns share
the result.

The daemon's functions choose the files to evict, and count the gaps between uses. Admission is simpler than the
pager's, which needs an engine, programs that get warnings, and a disk with jobs. All turns belong to one user, without
advice. Each turn counts as a use, however short its gap is. Gaps do not fade: old gaps count in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfs._pages import ffi, lib
from kvfs.pages.columns import Columns
from kvfs.tiers.candidates import files_in_order
from kvfs.tiers.policy import Files, FloatArray, Gaps, Rank
from libsym.abi import PAGE_ENTRIES
from symphony.policy.machine import Machine, pages_of
from symphony.policy.segments import Segment
from symphony.policy.workload import Turn


@dataclass(frozen=True, slots=True)
class TakenMemory:
    """State of memory when a turn begins."""

    ready_s: float
    """Time when the turn's pages are in memory: now, if no page was missing."""
    num_compute: int
    """Number of earlier entries of the file that the turn has to compute, beside its new entries."""
    num_again: int
    """Number of these earlier entries that were computed before, and then lost."""


class Memory:
    """Memory and disk of a replay. `rank`: the policy; None: no tiers."""

    def __init__(self, segments: Sequence[Segment], num_frames: int, machine: Machine, rank: Rank | None) -> None:
        count = len(segments)
        self._machine, self._rank = machine, rank
        self._start = np.array([each.start for each in segments], np.int64)
        self._size = np.array([each.size for each in segments], np.int64)
        self._has = np.array([each.num_initial for each in segments] if rank else [0] * count, np.int64)
        """[segments]: number of entries that are computed and not lost."""
        self._ever = self._has.copy()
        self._resident = np.zeros(count, np.int64)
        """[segments]: number of pages in memory, which are the first pages of the segment."""
        self._kept = pages_of(self._has.astype(float)).astype(np.int64)
        """[segments]: number of pages whose present content is on disk, which are the first pages of the segment."""
        self._users = np.zeros(count, np.int64)
        """[segments]: number of turns that need the segment now."""
        rows, self._rows = Columns("row_columns", count, count), ffi.new("row_columns *")
        """Columns on the uses of each segment, counted as the daemon counts the uses of a file."""
        rows.tell(self._rows[0])
        self._ended_s, self._num_uses, self._priority = rows["last_use_s"], rows["num_uses"], rows["priority"]
        self._gap_s, self._gap_spread_s = rows["gap_s"], rows["gap_spread_s"]
        self._here_s = np.zeros(count)
        """[segments]: time when the pages that are being read arrive in memory."""
        self._gaps = Gaps()
        self._read_free_s = self._write_free_s = 0.0
        self.num_frames = num_frames
        self.num_free = num_frames
        self.most_used = 0
        self.num_in = self.num_out = self.num_decisions = 0
        """Counts of pages read, of pages written, and of decisions on evictions."""

    def take(self, turn: Turn, now_s: float) -> TakenMemory | None:
        """Allocate the memory that a turn needs until its end. None: memory has no room."""
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
        # The copy on disk of a page that gets entries is out of date.
        self._kept[grown] = np.minimum(self._kept[grown], self._has[grown] // PAGE_ENTRIES)
        self._has[chain] = changed
        self._ever[chain] = np.maximum(self._ever[chain], changed)
        return TakenMemory(
            max(ready_s, float(self._here_s[chain].max(initial=0))), int(compute.sum()), int(again.sum())
        )

    def give_back(self, turn: Turn, now_s: float) -> None:
        """Release the memory of a turn that is over, and note its file's growth."""
        chain = np.array(turn.chain, np.intp)
        needs = np.minimum(turn.after - self._start[chain], self._size[chain])
        self._has[chain] = np.maximum(self._has[chain], needs)
        self._ever[chain] = np.maximum(self._ever[chain], needs)
        self._users[chain] -= 1
        done = chain[self._users[chain] == 0]
        self._ended_s[done] = now_s

    def drop(self, segment: int) -> None:
        """Drop a segment that has no name and that no later turn needs."""
        self.num_free += int(self._resident[segment])
        self._resident[segment] = self._has[segment] = self._kept[segment] = 0

    def is_here(self, turn: Turn) -> bool:
        """Return whether memory has all pages of a turn's file."""
        chain = list(turn.chain)
        before = np.clip(turn.before - self._start[chain], 0, self._size[chain])
        return bool((pages_of(before.astype(float)) <= self._resident[chain]).all())

    def has_any(self, turn: Turn) -> bool:
        """Return whether an entry of a turn's file has been computed, so that the turn is a resume."""
        return bool((self._ever[list(turn.chain)] > 0).any())

    def _note_begin(self, chain: np.ndarray[tuple[int], np.dtype[np.intp]], now_s: float, priority: int) -> None:
        fresh = chain[self._users[chain] == 1]
        self._priority[fresh] = priority
        used = fresh[self._num_uses[fresh] > 0]
        for row, gap_s in zip(used.tolist(), (now_s - self._ended_s[used]).tolist(), strict=True):
            self._gaps.add(gap_s)
            lib.core_note_gap(self._rows, row, gap_s)
        self._num_uses[fresh] = np.maximum(self._num_uses[fresh], 1)

    def _make_room(self, num_pages: int, now_s: float) -> float | None:
        """Evict `num_pages` pages, and return the time when their frames are free.
        None: too few pages may be evicted.
        """
        if num_pages <= 0:
            return now_s
        may_go = np.flatnonzero((self._users == 0) & (self._resident > 0))
        resident = self._resident[may_go]
        if resident.sum() < num_pages:
            return None
        self.num_decisions += 1
        one_user, no_advice = np.zeros(len(may_go), np.int64), np.zeros(len(may_go), np.bool_)
        worth, priority = self._worth(may_go, now_s), self._priority[may_go]
        order = files_in_order(worth, priority, one_user, no_advice, no_advice)
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

    def _worth(self, some: np.ndarray[tuple[int], np.dtype[np.intp]], now_s: float) -> FloatArray:
        ended_s: FloatArray = self._ended_s[some]
        if self._rank is None:
            return ended_s  # the least recently used segments are evicted first
        pages, num_uses = self._resident[some].astype(float), self._num_uses[some]
        files = Files(
            num_pages=pages,
            idle_s=now_s - ended_s,
            num_uses=num_uses,
            gap_s=np.where(num_uses > 1, self._gap_s[some], np.nan),
            gap_spread_s=np.where(num_uses > 2, self._gap_spread_s[some], np.nan),
            bring_s=self._machine.bring_s(pages),
            compute_s=self._machine.compute_s(self._has[some].astype(float), self._start[some].astype(float)),
            is_open=np.ones(len(some), np.bool_),
        )
        return self._rank(files, self._gaps)
