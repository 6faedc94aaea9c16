"""Feeds the service manager's watchdog, as long as the daemon does what it is for.

That it feeds at all shows that the trio thread goes on. The step thread is looked at: a step that takes longer than any
could has the watchdog starve, so the service manager ends the daemon, and starts it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from symphony.service.notify import Notifier

log = logging.getLogger(__name__)

MEALS = 4
"""In the time after which the watchdog bites."""


async def feed_for_ever(notifier: Notifier, step_age_s: Callable[[], float], limit_s: Callable[[], float]) -> None:
    """`step_age_s`: of the step under way, 0 without one; `limit_s`: how old one may get."""
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
