"""Waits for the kernel to forget removed files. The kernel remembers a removed file for a moment, and the owner is
charged until then.

A user at the quota who removes a file and makes another would be refused, although there will be room. So a call that
is refused with `StillCharged` is tried again at each file that the kernel forgets. A call that is refused for another
reason does not wait.

A waiting call holds the kernel's lock of its directory. This lock blocks other calls in the directory. So all calls of
a user together wait at most PATIENCE_S at first, and from then on at most 1 / REST of the time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvfs.pages.accounts import StillCharged

PATIENCE_S = 0.05
"""Time to wait for the kernel. The kernel usually forgets a file in less than a millisecond, but a program can prevent
this (O_PATH).
"""
REST = 20
"""Seconds after which a user's calls may wait one second more."""

_Result = TypeVar("_Result")


async def when_forgotten(attempt: Callable[[], Awaitable[_Result]]) -> _Result:
    """Repeat an attempt whenever the kernel has forgotten a file of the account that lacks room.

    `StillCharged`: the user's calls may wait no longer. An attempt that has room is never cut short.
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
