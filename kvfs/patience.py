"""Waiting for the kernel to forget files: it remembers a removed one for a moment, and its owner pays until then.

A user at his quota who removes a file and makes another would be refused although there is room. So who is refused
with `StillCharged` tries again at each file that the kernel forgets. Other accounts, and calls that lack room anyway,
wait for nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvfs.pages.accounts import StillCharged

PATIENCE_S = 0.05
"""For the kernel, which takes less than a millisecond; a program can keep it from forgetting (O_PATH)."""

_Result = TypeVar("_Result")


async def when_forgotten(attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Attempt something again whenever the kernel has forgotten a file of the account that lacks room.

    After PATIENCE_S `StillCharged` is raised. An attempt that has room is never cut short.
    """
    ends_s = trio.current_time() + PATIENCE_S
    while True:
        try:
            return await attempt()
        except StillCharged as refusal:
            waiting, forgotten = refusal.account.waiting, trio.Event()
            waiting.append(forgotten.set)
            try:
                with trio.move_on_at(ends_s):
                    await forgotten.wait()
            finally:
                if not forgotten.is_set():
                    waiting.remove(forgotten.set)
            if not forgotten.is_set():
                raise
