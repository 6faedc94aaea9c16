"""Threads of this process that C started."""

import threading
import time
from pathlib import Path


def foreign_threads() -> set[int]:
    tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return tasks - {thread.native_id for thread in threading.enumerate()}


def have_ended(threads: set[int]) -> bool:
    """Wait until these threads have ended. A joined thread may still be listed for a moment."""
    deadline = time.monotonic() + 10
    while threads & foreign_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not threads & foreign_threads()
