"""Memory use of all processes of the machine together: an upper bound of each program's memory."""

from __future__ import annotations

import time

_KEPT_S = 0.05
"""Time for which a figure is cached, since a thousand programs may ask for it."""
_COUNTED = b"AnonPages:", b"Mapped:"
"""Lines of /proc/meminfo whose sum is the memory of all processes."""


class MachineMemory:
    """Cached reader of /proc/meminfo."""

    def __init__(self) -> None:
        self._read_s = float("-inf")
        self._bytes = 0

    def memory_bytes(self) -> int:
        now_s = time.monotonic()
        if now_s - self._read_s > _KEPT_S:
            with open("/proc/meminfo", "rb") as file:  # noqa: PTH123 - faster
                self._bytes = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(_COUNTED))
            self._read_s = now_s
        return self._bytes
