"""A bell wakes one task: what rings it need not know who sleeps. Owned by the daemon's trio thread."""

from __future__ import annotations

import trio


class Bell:
    """Rings until its task has heard it."""

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self) -> None:
        """Return when it has rung since the last wait ended."""
        try:
            await self._rung.wait()
        finally:
            self._rung = trio.Event()
