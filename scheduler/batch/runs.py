"""The run under way, if there is one, and how files and programs see meanwhile what it has done.

Files do not show it by themselves: `sync` brings them up to date, before anybody looks at them.
"""

from __future__ import annotations

import os
from contextlib import suppress

import trio

from kvfs.fs import FileSystem
from kvfs.pages.table import PageTable
from scheduler.batch.accounting import Accounting
from scheduler.batch.run import Member, Run


class Runs:
    """At most one at a time. All of it on the trio thread."""

    def __init__(self, fs: FileSystem, accounting: Accounting) -> None:
        self._fs = fs
        self._accounting = accounting
        self.run: Run | None = None
        self._synced = 0
        """Progress of the run that the files show already."""
        self.wake_fd = -1
        """Rung by a run when the programs' rings hold something for the gate."""

    def begin(self, run: Run) -> None:
        self.run, self._synced = run, 0

    def end(self) -> None:
        """It was executed: count the rest of it, and let the gate look at what has come."""
        run = self.run
        assert run is not None
        self._sync(run)
        self.run = None
        self._wake_programs(run)
        for num_calls in range(1, len(run.members) + 1):
            if num_steps := run.steps_of(num_calls):
                self._accounting.statistics.count_size(num_calls, num_steps)

    def stop(self) -> None:
        """End it after the step under way: somebody has to decide something."""
        if self.run is not None:
            self.run.stop()

    def stop_if_holds(self, table: PageTable) -> None:
        if self.run is not None and self.run.holds(table):
            self.run.stop()

    def sync(self) -> None:
        """Let files show what the run has computed so far."""
        run = self.run
        if run is not None and run.progress != self._synced:
            self._sync(run)

    def _sync(self, run: Run) -> None:
        self._synced = run.progress
        for member in run.members:
            self._commit(member)
        self._accounting.count_run(run)

    def _commit(self, member: Member) -> None:
        num_done, call = member.num_done, member.call
        if num_done > member.num_committed:
            assert call.reservation is not None
            call.reservation.commit_first(member.log[member.num_committed : num_done])
            self._fs.committed(call.file)
            member.num_committed = num_done

    async def watch(self) -> None:
        """A run polls the rings of its programs; what it finds there for others is for the gate."""
        while True:
            await trio.lowlevel.wait_readable(self.wake_fd)
            if self.run is not None:
                self._wake_programs(self.run)

    def _wake_programs(self, run: Run) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
            run.wake_programs()
