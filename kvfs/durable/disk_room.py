"""The room that attributes and symbolic links leave the file system of the state.

An index without room for a commit can't be told what was removed, so nothing would ever make room again. Each commit
has a job look how much is left; between two looks the growth of what is no page counts. Pages and plain files fill the
rest as well: what removes them is a few rows, for which the index's log holds room.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvfs.durable.disk_jobs import DiskJobs, Job
from libsym.errors import NoSpace

log = logging.getLogger(__name__)

RESERVE_BYTES = 32 << 20
"""8 MiB of attributes wait for a commit at most; the index's log takes as much, and then the index."""


class DiskRoom:
    """Room that a file system has left, as a job saw it last. On the trio thread, but for `_look`."""

    def __init__(self, directory: Path, jobs: DiskJobs, other_bytes: Callable[[], int]) -> None:
        """`other_bytes`: bytes that are no page's, those that no commit has included."""
        self._directory = directory
        self._jobs = jobs
        self._other_bytes = other_bytes
        self._is_looking = self._is_told = False
        self._look(other_bytes())

    def require(self, num_bytes: int) -> None:
        """NoSpace: attributes and links may not take so much more. The refusal has a job look again."""
        there, other_bytes = self._seen
        left = there - max(0, self._other_bytes() - other_bytes)
        if left - num_bytes < RESERVE_BYTES:
            self.look_again(self._other_bytes())
            refusal = NoSpace(
                f"the file system of {self._directory} has {left} bytes left, and attributes and links leave it "
                f"{RESERVE_BYTES}, so that what is removed can be forgotten: remove files"
            )
            if not self._is_told:
                self._is_told = True
                log.warning("%s", refusal)  # who is refused sees ENOSPC, and df says that there is room
            raise refusal

    def look_again(self, other_bytes: int) -> None:
        """Have a job look: of what is no page's, the file system has so many bytes."""

        def looked(job: Job[None]) -> None:
            self._is_looking = False
            if job.error is not None:
                log.warning("can't look for room in %s: %s", self._directory, job.error)

        if not self._is_looking:
            self._is_looking = True
            self._jobs.start(partial(self._look, other_bytes), looked)

    def _look(self, other_bytes: int) -> None:
        self._seen = shutil.disk_usage(self._directory).free, other_bytes
