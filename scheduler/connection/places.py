"""A number of places that users share, so that none of them can take them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from libsym.errors import WouldBlock


class Places:
    """A user gets one more place while it has fewer than are free: half of all alone, a quarter beside that user, …

    So there is a place for the next user, however many the others try to take; `exempt` users may take the last ones.
    """

    def __init__(self, num_places: int, what: str, exempt: frozenset[int]) -> None:
        """`what`: the places are, in messages."""
        self._num_places = self._num_free = num_places
        self._what = what
        self._exempt = exempt
        self._taken: Counter[int] = Counter()

    @contextmanager
    def one_for(self, uid: int) -> Iterator[None]:
        """Have a place. WouldBlock: there is none for this user now."""
        taken = self._taken[uid]
        if self._num_free == 0:
            raise WouldBlock(f"all {self._num_places} {self._what} of the daemon are taken: try again later")
        if taken >= self._num_free and uid not in self._exempt:
            raise WouldBlock(
                f"uid {uid} has {taken} of the daemon's {self._num_places} {self._what}, and {self._num_free} are left "
                "for others: end some, or try again later"
            )
        self._num_free -= 1
        self._taken[uid] += 1
        try:
            yield
        finally:
            self._num_free += 1
            self._taken[uid] -= 1
            if not self._taken[uid]:
                del self._taken[uid]
