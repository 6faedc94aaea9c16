"""Admission of programs: limits on how many programs a user may have, and on how many it may start in a minute."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from libsym.errors import WouldBlock

MAX_AT_ONCE = 1000
MAX_PER_MINUTE = 6000
_MINUTE_S = 60.0


@dataclass(slots=True)
class _User:
    num_living: int = 0
    starts: deque[float] = field(default_factory=deque)
    """Times of the starts in the last minute."""


class Admission:
    """Counts the programs that launchers start. Processes that connect without a launcher are not limited here."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE, max_per_minute: int = MAX_PER_MINUTE) -> None:
        self._max_at_once = max_at_once
        self._max_per_minute = max_per_minute
        self._users: dict[int, _User] = {}
        self.num_refused = 0

    def limit(self, max_at_once: int, max_per_minute: int) -> None:
        """Set new limits. Running programs stay."""
        self._max_at_once, self._max_per_minute = max_at_once, max_per_minute

    def admit(self, uid: int) -> None:
        """Count one more program of a user. WouldBlock: the user has too many, or has started too many in a minute."""
        user, now_s = self._users.setdefault(uid, _User()), time.monotonic()
        while user.starts and user.starts[0] <= now_s - _MINUTE_S:
            user.starts.popleft()
        if user.num_living >= self._max_at_once:
            self._refuse(
                f"uid {uid} has {user.num_living} programs, and {self._max_at_once} at once are the most (--programs): "
                "end some, or try again later"
            )
        if len(user.starts) >= self._max_per_minute:
            wait_s = user.starts[0] + _MINUTE_S - now_s
            self._refuse(
                f"uid {uid} has started {len(user.starts)} programs in the last minute, and {self._max_per_minute} "
                f"are the most (--starts): try again in {wait_s:.0f} s"
            )
        user.starts.append(now_s)
        user.num_living += 1

    def admit_again(self, uid: int) -> None:
        """Count a program that was admitted before the daemon was restarted."""
        self._users.setdefault(uid, _User()).num_living += 1

    def ended(self, uid: int) -> None:
        """Count a program of the user as ended."""
        self._users[uid].num_living -= 1

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        raise WouldBlock(why)
