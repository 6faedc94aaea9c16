"""Control files that are made when they are read, and how much of the daemon they take.

Time: a document is made anew for each reader while that takes a tenth of the daemon's time at most. Beyond it, readers
share the last one: it is as old then as ten times what it takes to make it.

Memory: a document is kept by those that have read a part of it, of each user by `MAX_PARTLY_READ` at most.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

from libsym.errors import OverQuota

MAX_PARTLY_READ = 256
"""Open files of one user that have more to tell of what was read."""

_SHARE = 0.1
_BURST_S = 0.25
"""Of making documents, after a rest: some hundred of them."""
_MAX_SHARED = 1024
"""Documents of which the last one is kept."""


class Documents:
    """Documents of control files. Owned by the trio thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared: OrderedDict[Hashable, bytes] = OrderedDict()
        self._spare_s, self._at_s = _BURST_S, clock()
        self._partly_read = Counter[int]()

    def get(self, key: Hashable, make: Callable[[], str]) -> bytes:
        """The document of a key: a new one where time is left for it, else the last."""
        began_s = self._clock()
        self._spare_s = min(_BURST_S, self._spare_s + _SHARE * (began_s - self._at_s))
        self._at_s = began_s
        document = self._shared.get(key)
        if document is None or self._spare_s > 0:
            document = self._shared[key] = make().encode()
            self._spare_s -= self._clock() - began_s
            if len(self._shared) > _MAX_SHARED:
                self._shared.popitem(last=False)
        return document

    def hold(self, uid: int) -> Callable[[], None]:
        """Count a document that a user has read in part; what is returned takes it back."""
        if self._partly_read[uid] >= MAX_PARTLY_READ:
            raise OverQuota(
                f"uid {uid} has read {MAX_PARTLY_READ} control files in part: read them to the end, or close them"
            )
        self._partly_read[uid] += 1
        return partial(self._let_go, uid)

    def _let_go(self, uid: int) -> None:
        self._partly_read[uid] -= 1
        if not self._partly_read[uid]:
            del self._partly_read[uid]
