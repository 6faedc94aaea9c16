"""Disk room: limits the bytes of attributes and symbolic links, so that the state's file system keeps room for commits.
Bytes of plain files that have no backing file yet get the rest of the room as their limit.

Without room for a commit the index could not record removals, so no room would ever become free. Each commit starts a
job that measures the free bytes. Until the next measurement, the growth of all bytes outside of pages is subtracted.
Pages and plain files may fill the rest of the disk: their removal takes only a few rows, and the index's log reserves
room for these rows.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvfs.durable.disk_jobs import DiskJobs, Job
from kvfs.names.disk import Unwritten
from libsym.errors import NoSpace

log = logging.getLogger(__name__)

RESERVE_BYTES = 32 << 20
"""Bytes that attributes and links must leave free. At most 8 MiB of attributes wait for a commit. Their commit needs as
many bytes in the index's log, and as many again in the index.
"""

UNWRITTEN_BYTES = 64 << 20
"""The most bytes of plain files without a backing file. When half of them are used, the write-back begins early."""


class DiskRoom:
    """Free bytes of a file system, as a job last measured them. Only `_look` runs outside the trio thread."""

    def __init__(self, directory: Path, jobs: DiskJobs, other_bytes: Callable[[], int], unwritten: Unwritten) -> None:
        """`other_bytes` returns the number of bytes outside of pages, including bytes that are not committed yet."""
        self._unwritten = unwritten
        self._directory = directory
        self._jobs = jobs
        self._other_bytes = other_bytes
        self._is_looking = self._is_told = False
        self._look(other_bytes())

    def require(self, num_bytes: int) -> None:
        """Raise NoSpace if attributes and links may not take `num_bytes` more bytes. After a refusal a job measures
        again.
        """
        there, other_bytes = self._seen
        left = there - max(0, self._other_bytes() - other_bytes)
        if left - num_bytes < RESERVE_BYTES:
            self.look_again(self._other_bytes())
            refusal = NoSpace(
                f"the file system of {self._directory} has {left} bytes left, and attributes and links must leave "
                f"{RESERVE_BYTES} free, so that removals can be committed: remove files"
            )
            if not self._is_told:
                self._is_told = True
                log.warning("%s", refusal)  # the program gets ENOSPC, although df shows room
            raise refusal

    def look_again(self, other_bytes: int) -> None:
        """Start a job that measures the free bytes. `other_bytes`: bytes outside of pages that the file system has by
        now.
        """

        def looked(job: Job[None]) -> None:
            self._is_looking = False
            if job.error is not None:
                log.warning("can't look for room in %s: %s", self._directory, job.error)

        if not self._is_looking:
            self._is_looking = True
            self._jobs.start(partial(self._look, other_bytes), looked)

    def _look(self, other_bytes: int) -> None:
        free = shutil.disk_usage(self._directory).free
        self._seen = free, other_bytes
        self._unwritten.most_bytes = max(0, min(free - RESERVE_BYTES, UNWRITTEN_BYTES))
