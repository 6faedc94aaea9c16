"""A queue for each file with work: its head is in flight, the others wait for it. And what waits for a handle."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.pages.table import PageTable
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.states import CallState

log = logging.getLogger(__name__)


class Action:
    """An act on a file between two calls."""

    __slots__ = ("do", "file")

    def __init__(self, file: OpenKv | KvFile, do: Callable[[], None]) -> None:
        """`file`: a handle of a program, or what somebody without a handle changes."""
        self.file = file
        self.do = do


Job: TypeAlias = FileCall | Action


class FileQueues:
    """Jobs in order; any of them leaves at once, however long its queue is."""

    def __init__(self, start: Callable[[Job], bool]) -> None:
        """`start`: a job is the head now. False: it is over already."""
        self._start = start
        self._jobs: dict[PageTable, OrderedDict[Job, None]] = {}
        self._num_jobs: Counter[OpenKv | KvFile] = Counter()
        """Of each handle, those that are queued or in flight."""
        self._when_unused: dict[OpenKv | KvFile, list[Callable[[], None]]] = {}
        """Actions that wait for the last job of a handle."""

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def add(self, job: Job) -> None:
        """Queue a job, and start it if the file is idle."""
        jobs = self._jobs.setdefault(job.file.table, OrderedDict())
        jobs[job] = None
        self._num_jobs[job.file] += 1
        if len(jobs) == 1:
            self.start(job.file.table)

    def adopt(self, call: FileCall) -> None:
        """A call is in flight already, on a file that was nobody's."""
        self._jobs[call.file.table] = OrderedDict({call: None})
        self._num_jobs[call.file] += 1

    def start(self, table: PageTable) -> None:
        """Start the head of a queue; actions and calls that fail at once are over when this returns."""
        jobs, over = self._jobs[table], list[Job]()
        while jobs and not self._start(_head(jobs)):
            over.append(jobs.popitem(last=False)[0])
        if not jobs:
            del self._jobs[table]
        for job in over:
            self.left(job)

    def next(self, head: FileCall) -> None:
        """The head of a queue is over: it is the next one's turn."""
        table = head.file.table
        jobs = self._jobs[table]
        found, _ = jobs.popitem(last=False)
        assert found is head
        if jobs:
            self.start(table)
        else:
            del self._jobs[table]
        self.left(head)

    def take_out(self, call: FileCall) -> bool:
        """A call leaves its queue. False: it is the head, or in none. Say `left` for it, as soon as it is answered."""
        jobs = self._jobs.get(call.file.table)
        if jobs is None or call not in jobs or _head(jobs) is call:
            return False
        del jobs[call]
        return True

    def head(self, table: PageTable) -> Job | None:
        """Return the job in flight for a file."""
        jobs = self._jobs.get(table)
        return _head(jobs) if jobs else None

    def is_waited_for(self, head: FileCall) -> bool:
        """Whether others wait behind what is in flight, or for its handle."""
        return len(self._jobs[head.file.table]) > 1 or head.file in self._when_unused

    def is_head(self, call: FileCall) -> bool:
        return self.head(call.file.table) is call

    def without_rows(self, file: OpenKv) -> list[FileCall]:
        """Calls of this very handle that wait for result slots."""
        jobs: Iterable[Job] = self._jobs[file.table] if file in self._num_jobs else ()
        calls = [job for job in jobs if isinstance(job, FileCall) and job.file is file]
        return [call for call in calls if call.state is CallState.WAITS_FOR_SLOTS]

    def left(self, job: Job) -> None:
        """Note that a job is in no queue any more: actions that wait for the last job of its handle may go on."""
        self._num_jobs[job.file] -= 1
        if not self._num_jobs[job.file]:
            del self._num_jobs[job.file]
            for action in self._when_unused.pop(job.file, ()):
                do(action)

    def replace(self, head: FileCall, other: FileCall) -> None:
        """Put another call of the same handle in the place of a head."""
        jobs = self._jobs[head.file.table]
        del jobs[head]
        jobs[other] = None
        jobs.move_to_end(other, last=False)

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> bool:
        """Run `action` when this handle has no job. False: it has some now."""
        if file not in self._num_jobs:
            action()
            return True
        self._when_unused.setdefault(file, []).append(action)
        return False

    def calls(self) -> list[FileCall]:
        return [job for queue in self._jobs.values() for job in queue if isinstance(job, FileCall)]

    def calls_of(self, caller: Caller) -> list[FileCall]:
        return [call for call in self.calls() if call.caller is caller]


def _head(jobs: OrderedDict[Job, None]) -> Job:
    return next(iter(jobs))


def do(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("what was to be done to a file failed")
