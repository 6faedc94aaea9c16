"""Queues of jobs, one for each file. The head of a queue is in flight, and its other jobs wait.

Actions may also wait until a handle has no jobs.
"""

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
    """Job that is a function, called between two calls on a file."""

    __slots__ = ("do", "file")

    def __init__(self, file: OpenKv | KvFile, do: Callable[[], None]) -> None:
        """Make an action. `file`: a handle of a program, or a file that is changed without a handle."""
        self.file = file
        self.do = do


Job: TypeAlias = FileCall | Action


class FileQueues:
    """All queues. A job leaves its queue in constant time, however long the queue is."""

    def __init__(self, start: Callable[[Job], bool]) -> None:
        """Make empty queues. `start` begins a job that is now the head; False: the job is over already."""
        self._start = start
        self._jobs: dict[PageTable, OrderedDict[Job, None]] = {}
        self._num_jobs: Counter[OpenKv | KvFile] = Counter()
        """Number of each handle's jobs that are queued or in flight."""
        self._when_unused: dict[OpenKv | KvFile, list[Callable[[], None]]] = {}
        """Actions that wait until a handle has no jobs."""

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
        """Make a queue for a call that is in flight already, on a file without a queue."""
        self._jobs[call.file.table] = OrderedDict({call: None})
        self._num_jobs[call.file] += 1

    def start(self, table: PageTable) -> None:
        """Start the head of a queue. If a job is over as soon as it is started, start the next job, too."""
        jobs, over = self._jobs[table], list[Job]()
        while jobs and not self._start(_head(jobs)):
            over.append(jobs.popitem(last=False)[0])
        if not jobs:
            del self._jobs[table]
        for job in over:
            self.left(job)

    def next(self, head: FileCall) -> None:
        """Remove a queue's head, a call that is over, and start the next job."""
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
        """Remove a waiting call; the caller calls `left` after the answer.

        False: the call is the head, or is not queued.
        """
        jobs = self._jobs.get(call.file.table)
        if jobs is None or call not in jobs or _head(jobs) is call:
            return False
        del jobs[call]
        return True

    def head(self, table: PageTable) -> Job | None:
        """Return the head of a file's queue."""
        jobs = self._jobs.get(table)
        return _head(jobs) if jobs else None

    def is_waited_for(self, head: FileCall) -> bool:
        """Return whether jobs wait behind the head, or actions wait for its handle."""
        return len(self._jobs[head.file.table]) > 1 or head.file in self._when_unused

    def is_head(self, call: FileCall) -> bool:
        return self.head(call.file.table) is call

    def without_rows(self, file: OpenKv) -> list[FileCall]:
        """Return the calls by this very handle that wait for result slots."""
        jobs: Iterable[Job] = self._jobs[file.table] if file in self._num_jobs else ()
        calls = [job for job in jobs if isinstance(job, FileCall) and job.file is file]
        return [call for call in calls if call.state is CallState.WAITS_FOR_SLOTS]

    def left(self, job: Job) -> None:
        """Note that a job has left its queue. If its handle has no jobs now, run the actions that wait until the handle
        is unused.
        """
        self._num_jobs[job.file] -= 1
        if not self._num_jobs[job.file]:
            del self._num_jobs[job.file]
            for action in self._when_unused.pop(job.file, ()):
                do(action)

    def replace(self, head: FileCall, other: FileCall) -> None:
        """Replace a queue's head by another call of the same handle."""
        jobs = self._jobs[head.file.table]
        del jobs[head]
        jobs[other] = None
        jobs.move_to_end(other, last=False)

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> bool:
        """Run `action` as soon as this handle has no jobs. False: the handle has jobs now, and the action waits."""
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
        log.exception("an action on a file failed")
