"""A bell wakes one task. The code that rings the bell need not know the task. The daemon's trio thread owns bells."""

from __future__ import annotations

import trio


class Bell:
    """A wake-up for one task. A ring is remembered until the task waits for it."""

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self) -> None:
        """Wait until the bell rings. A ring since the last wait counts."""
        try:
            await self._rung.wait()
        finally:
            self._rung = trio.Event()
