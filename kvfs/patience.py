"""Waiting for the kernel to forget files: it remembers a removed one for a moment, and its owner pays until then.

A user at his quota who removes a file and makes another would be refused although there is room. So who is refused
with `StillCharged` tries again at each file that the kernel forgets. Calls that lack room anyway wait for nothing.

A call that waits has the kernel's lock of its directory, and others' calls there wait for it. So all calls of a user
wait PATIENCE_S together, and from then on a part in REST of the time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvfs.pages.accounts import StillCharged

PATIENCE_S = 0.05
"""For the kernel, which takes less than a millisecond; a program can keep it from forgetting (O_PATH)."""
REST = 20
"""Seconds after which a user's calls may wait one second more."""

_Result = TypeVar("_Result")


async def when_forgotten(attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Attempt something again whenever the kernel has forgotten a file of the account that lacks room.

    When its user's patience is at an end `StillCharged` is raised. An attempt that has room is never cut short.
    """
    while True:
        try:
            return await attempt()
        except StillCharged as refusal:
            *_, payer = refusal.account.chain()
            waiting, forgotten, now_s = refusal.account.waiting, trio.Event(), trio.current_time()
            waiting.append(forgotten.set)
            try:
                with trio.move_on_after(max(0, PATIENCE_S - max(0, payer.patient_at_s - now_s) / REST)):
                    await forgotten.wait()
            finally:
                payer.patient_at_s = max(payer.patient_at_s, now_s) + REST * (trio.current_time() - now_s)
                if not forgotten.is_set():
                    waiting.remove(forgotten.set)
            if not forgotten.is_set():
                raise
