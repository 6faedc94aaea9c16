"""Documents: control files whose bytes are made when they are read, with limits on the time and memory that they cost.

Time: as long as making documents takes at most a tenth of the daemon's time, each reader gets a new document. Beyond
this limit, readers share the last document. The age of a shared document is at most ten times the time that it took to
make the document.

Memory: a handle keeps its document until the document is read to its end. Each user may have at most `MAX_PARTLY_READ`
handles that keep a document.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

from libsym.errors import OverQuota

MAX_PARTLY_READ = 256
"""The most handles of one user that keep a document because it was read only in part."""

_SHARE = 0.1
_BURST_S = 0.25
"""After a pause, readers get new documents for this many seconds of work: enough for about a hundred documents."""
_MAX_SHARED = 1024
"""The most documents that are kept for sharing."""


class Documents:
    """Documents of control files. Owned by the trio thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared: OrderedDict[Hashable, bytes] = OrderedDict()
        self._spare_s, self._at_s = _BURST_S, clock()
        self._partly_read = Counter[int]()

    def get(self, key: Hashable, make: Callable[[], str]) -> bytes:
        """Return a new document for the key if the time budget allows it, else the last document for the key."""
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
        """Count a document that a user has read in part. Return a function that undoes the count."""
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
