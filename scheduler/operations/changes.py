"""KV_CHANGES: what has happened to KV files since a change, in replies of bounded size.

A reader first gets all files, in several replies, and then the changes since the first of these replies. The daemon
keeps nothing for a reader: each request carries the place that the last reply gave. A directory that gets another name
or other rights may change what a user sees of many files. All readers begin anew then, at most once in `ANEW_S`.

The run commits entries when they are asked for, and a commit takes 20 us for each file. So readers see what the run has
computed `LOOK_S` later at most. A call that waits for a change looks again when the core reports a change, and each
`LOOK_S`. Two looks are at least `LEAST_S` apart, so changes that the caller may not see cost little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import trio

from kvfs.facts.changes import ChangesReader, FileChange, Place
from kvfs.fs import FileSystem
from kvfs.names.inode import Credentials
from libsym.abi import NO_TIMEOUT, Op
from libsym.errors import Invalid
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_WAITS
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply

LOOK_S, LEAST_S, ANEW_S = 0.1, 0.02, 2.0
MOST_BYTES = 200_000
"""Bytes of a reply after which no further look follows. One look may find paths of 800,000 bytes."""
MOST_LOOKS = 256


@dataclass(slots=True)
class _Answer:
    """An answer that grows."""

    place: Place
    is_anew: bool = False
    is_more: bool = False
    rows: list[str] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def is_news(self) -> bool:
        return self.is_anew or bool(self.rows)

    def begin_anew(self) -> None:
        self.is_anew, self.rows, self.num_bytes = True, [], 0

    def add(self, found: list[FileChange]) -> None:
        rows = [_row(change) for change in found]
        self.rows += rows
        self.num_bytes += sum(map(len, rows))

    def reply(self) -> Reply:
        args = self.place.since, self.place.row, int(self.is_more), int(self.is_anew)
        return Reply(args, f"[{','.join(self.rows)}]".encode("ascii"))


class Changes:
    """Answers KV_CHANGES."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler) -> None:
        self._pool, self._tree, self._batches = fs.pool, fs.volume.tree, batches
        self._reader = ChangesReader(fs.volume)
        self._num_moves = self._tree.num_moves
        self._anew = 0
        """The change at which directories were found to have moved. Readers of earlier places begin anew."""
        self._anew_s = self._committed_s = -math.inf

    def table(self) -> Table:
        return {Op.KV_CHANGES: Operation(self.changes, takes_payload=False, max_waiting=MAX_WAITS, commits_itself=True)}

    def changes(self, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        """args[0] and args[1] are the place that the last reply gave. args[2] is the time to wait, in ms.

        A single look answers most calls, without a task.
        """
        since, row, timeout_ms, _ = call.request.args
        if since < 0 or not 0 <= row < 1 << 31:
            raise Invalid(f"KV_CHANGES: no reply gives the place {since}, {row}")
        if timeout_ms < NO_TIMEOUT:
            raise Invalid(f"a timeout of {timeout_ms} ms: give 0 or more, or -1 to wait for ever")
        self._commit()
        answer = _Answer(Place(since, row))
        self._look(answer, call.lip.credentials)
        if row:
            timeout_ms = 0
        if not answer.is_more and (answer.is_news or timeout_ms == 0):
            return answer.reply()
        end_s = math.inf if timeout_ms == NO_TIMEOUT else trio.current_time() + timeout_ms / 1000
        return self._go_on(answer, call.lip.credentials, end_s)

    async def _go_on(self, answer: _Answer, creds: Credentials, end_s: float) -> Reply:
        """Look until the answer is complete, and wait for news until `end_s`."""
        while True:
            num_looks, was_listing = 1, False
            while answer.is_more and answer.num_bytes < MOST_BYTES and num_looks < MOST_LOOKS:
                if was_listing and not answer.place.row:
                    break  # the list is complete: after 8,192 changes meanwhile, a further look would begin it again
                was_listing = bool(answer.place.row)
                await trio.lowlevel.checkpoint()
                self._look(answer, creds)
                num_looks += 1
            if answer.is_news or trio.current_time() >= end_s:
                return answer.reply()
            changed = self._pool.changed
            self._reader.watch()
            with trio.move_on_at(min(end_s, trio.current_time() + LOOK_S)):
                await changed.wait()
            await trio.sleep(LEAST_S)
            self._commit()
            self._look(answer, creds)

    def _look(self, answer: _Answer, creds: Credentials) -> None:
        """Add to an answer what the next look finds."""
        self._note_moves()
        if not answer.place.row and answer.place.since < self._anew:
            answer.place = Place()
        answer.place, begins, found = self._reader.look(answer.place, creds)
        if begins:
            answer.begin_anew()
        answer.add(found)
        answer.is_more = bool(answer.place.row) or answer.place.since < self._reader.last

    def _commit(self) -> None:
        now_s = trio.current_time()
        if now_s - self._committed_s >= LOOK_S:
            self._batches.sync()
            self._committed_s = now_s

    def _note_moves(self) -> None:
        now_s = trio.current_time()
        if self._num_moves != self._tree.num_moves and now_s - self._anew_s >= ANEW_S:
            self._num_moves, self._anew_s = self._tree.num_moves, now_s
            self._anew = self._reader.begin_anew()


def _row(change: FileChange) -> str:
    """Return a change in JSON. Facts that are false, 0 or unknown are left out."""
    return json.dumps({name: fact for name, fact in zip(FileChange._fields, change, strict=True) if fact})
