"""Feeds the service manager's watchdog as long as the daemon works.

Each feeding proves that the trio thread runs. The step thread is checked, too: while a step takes longer than its
limit, the watchdog is not fed. Then the service manager ends the daemon, and starts it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from symphony.service.notify import Notifier

log = logging.getLogger(__name__)

MEALS = 4
"""Number of feedings within the watchdog's time limit."""


async def feed_for_ever(notifier: Notifier, step_age_s: Callable[[], float], limit_s: Callable[[], float]) -> None:
    """Feed the watchdog until cancelled, except while a step takes longer than its limit.

    `step_age_s` returns the age of the step that runs, or 0. `limit_s` returns the limit.
    """
    if not notifier.watchdog_s:
        return
    is_starving = False
    while True:
        age_s = step_age_s()
        if age_s <= limit_s():
            notifier.alive()
        elif not is_starving:
            text = "a step is computed for %.0f s, and %g are the most (the key watchdog): the watchdog is not fed"
            log.error(text, age_s, limit_s())
            notifier.status(f"a step has been computed for {age_s:.0f} s")
        is_starving = age_s > limit_s()
        await trio.sleep(notifier.watchdog_s / MEALS)
