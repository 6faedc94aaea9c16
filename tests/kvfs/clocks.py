"""Tests in which time passes only when everybody waits for it."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing


def while_alarms_go_off(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine as a test beside the task of its fixture `alarms`, or of the alarms of its file system `fs`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        alarms = fixtures["alarms"] if "alarms" in fixtures else fixtures["fs"].volume.alarms

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alarms.run)
                await test(**fixtures)
                nursery.cancel_scope.cancel()

        trio.run(both, clock=trio.testing.MockClock(autojump_threshold=0))

    return run
