"""Recorder: passes the scheduler's events to recordings. Without a recording its cost is near zero.

While `is_on` is true, code on the trio thread reports its decisions here. Each recording has a bounded queue of its
own. A full queue keeps its blocks, drops new blocks, and counts the dropped records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.trace.records import (
    ACCOUNT,
    ANSWER,
    ARRIVAL,
    FILE,
    FILES_SINCE,
    LOST,
    NO_DEADLINE,
    SEAT,
    STEP,
    VERSION,
    Block,
    BlockKind,
    CallKind,
    Records,
)

MAX_QUEUE_BYTES = 8 << 20
"""Maximum number of bytes in one recording's queue: ten seconds of 64 decodes in steps of 2 ms."""
MAX_NOTED = 4096
"""Number of arrivals, answers or seats after which the recorder queues a block: a quarter of a megabyte."""
_BLOCK_BYTES = 512
"""Bytes that the objects of a block take beside its records."""


class Recording:
    """Queue of the blocks that one reader has not taken yet."""

    def __init__(self, max_bytes: int = MAX_QUEUE_BYTES, version: int = VERSION) -> None:
        """`version`: the version of the format that the reader knows. The reader gets no newer kinds of blocks."""
        self._version = version
        self._max_bytes = max_bytes
        self._blocks: deque[Block] = deque()
        self._num_bytes = 0
        self._num_lost = 0  # since the last LOST block

    def put(self, block: Block) -> None:
        if block.kind is BlockKind.FILES and self._version < FILES_SINCE:
            return
        size = block.num_bytes + _BLOCK_BYTES
        if self._num_bytes + size > self._max_bytes:
            self._num_lost += len(block.records)
            return
        self._blocks.append(block)
        self._num_bytes += size

    def take(self) -> Block | None:
        """Take the oldest block or, if the queue is empty, a block that counts lost records. None: nothing is left."""
        if not self._blocks:
            return self._loss()
        block = self._blocks.popleft()
        self._num_bytes -= block.num_bytes + _BLOCK_BYTES
        return block

    def _loss(self) -> Block | None:
        if not self._num_lost:
            return None
        records = np.array([(time.monotonic_ns(), self._num_lost)], LOST)
        self._num_lost = 0
        return Block.of(BlockKind.LOST, records)


class Recorder:
    """Recorder of events, which passes each event to all recordings."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether there is a recording. Without a recording, callers need not report events."""
        self._recordings: list[Recording] = []
        self._arrivals: list[tuple[int, ...]] = []
        self._accounts: list[int] = []
        self._answers: list[tuple[int, int, int, int]] = []
        self._files: list[tuple[int, int, int, int]] = []
        self._told: dict[int, bool] = {}
        """Inodes that were reported to all recordings, and whether each had a name in the last report."""
        self._steps: list[tuple[Records, Records]] = []
        self._num_seats = 0

    # Recordings

    def begin(self, tell: Callable[[], None], version: int = VERSION) -> Recording:
        """Begin a recording of all events from now on. `tell` reports the calls that are under way; no other recording
        gets these reports.
        """
        self.flush()
        self._told.clear()
        recording = Recording(version=version)
        others, self._recordings = self._recordings, [recording]
        tell()
        self.flush()
        self._recordings = [*others, recording]
        self.is_on = True
        return recording

    def end(self, recording: Recording) -> None:
        """End a recording. The recording gets all events until now."""
        self.flush()
        self._recordings.remove(recording)
        self.is_on = bool(self._recordings)

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    # Events, with times of the monotonic clock

    def arrived(
        self,
        call: int,
        pid: int,
        uid: int,
        accounts: Sequence[int],
        inode: int,
        num_before: int,
        num_tokens: int,
        kind: CallKind,
        priority: int,
        deadline_ns: int | None,
        ns: int,
    ) -> None:
        """Note that a call has arrived. `accounts`: its payers, a uid and then domains, the innermost last."""
        deadline = NO_DEADLINE if deadline_ns is None else deadline_ns
        places = (len(self._accounts), len(accounts))
        self._arrivals.append((call, ns, deadline, inode, num_before, num_tokens, pid, uid, *places, kind, priority))
        self._accounts += accounts
        if len(self._arrivals) >= MAX_NOTED or len(self._accounts) >= MAX_NOTED:
            self.flush()

    def of_file(self, inode: int, source: tuple[int, int] | None, *, is_named: bool) -> None:
        """Note the file of a call that was noted earlier.

        `source`: the file from which this file was forked, and the number of shared entries.
        """
        if self._told.get(inode) is is_named:
            return
        self._told[inode] = is_named
        self._files.append((inode, *(source or (0, 0)), is_named))
        if len(self._files) >= MAX_NOTED:
            self.flush()

    def answered(self, call: int, num_entries: int, code: int, ns: int) -> None:
        """Note that a call is over. `code`: the errno, or 0."""
        self._answers.append((call, ns, num_entries, code))
        if len(self._answers) >= MAX_NOTED:
            self.flush()

    def steps(self, steps: Records, seats: Records) -> None:
        """Note finished steps in order, as arrays of `STEP` and `SEAT`. The seats are in the order of the steps.

        The recorder owns both arrays from here on, and sets `first_seat`.
        """
        assert steps.dtype == STEP
        assert seats.dtype == SEAT
        self._steps.append((steps, seats))
        self._num_seats += len(seats)
        if len(self._steps) >= MAX_NOTED or self._num_seats >= MAX_NOTED:
            self.flush()

    def flush(self) -> None:
        """Pass all collected events to the recordings."""
        if self._arrivals:
            arrivals, accounts = np.array(self._arrivals, ARRIVAL), np.array(self._accounts, np.int64).view(ACCOUNT)
            self._arrivals, self._accounts = [], []
            self._put(Block(BlockKind.ARRIVALS, arrivals, accounts))
        if self._files:
            files, self._files = np.array(self._files, FILE), []
            self._put(Block.of(BlockKind.FILES, files))
        if self._answers:
            answers, self._answers = np.array(self._answers, ANSWER), []
            self._put(Block.of(BlockKind.ANSWERS, answers))
        if self._steps:
            steps, seats = (np.concatenate(each) for each in zip(*self._steps, strict=True))
            self._steps, self._num_seats = [], 0
            steps["first_seat"] = np.cumsum(steps["num_calls"]) - steps["num_calls"]
            self._put(Block(BlockKind.STEPS, steps, seats))

    def _put(self, block: Block) -> None:
        for recording in self._recordings:
            recording.put(block)
