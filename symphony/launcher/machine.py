"""What all processes of the machine have in memory together: no program has more."""

from __future__ import annotations

import time

_KEPT_S = 0.05
"""So old may the figure be: a thousand programs ask for it."""
_COUNTED = b"AnonPages:", b"Mapped:"
"""Whatever a process has in memory is one of these two."""


class Machine:
    """Reads /proc/meminfo, and not too often."""

    def __init__(self) -> None:
        self._read_s = float("-inf")
        self._bytes = 0

    def memory_bytes(self) -> int:
        now_s = time.monotonic()
        if now_s - self._read_s > _KEPT_S:
            with open("/proc/meminfo", "rb") as file:  # noqa: PTH123 - often
                self._bytes = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(_COUNTED))
            self._read_s = now_s
        return self._bytes
