"""A limited number of places for users. No user can take all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from libsym.errors import WouldBlock


class Places:
    """Places for users. A user with fewer places than are free gets one more.

    So a single user gets half of all places, the next user a quarter, and a new user always gets a place. `exempt`
    users may take the last places.
    """

    def __init__(self, num_places: int, what: str, exempt: frozenset[int]) -> None:
        """Divide `num_places` places. `what`: the plural noun for such places in messages."""
        self._num_places = self._num_free = num_places
        self._what = what
        self._exempt = exempt
        self._taken: Counter[int] = Counter()

    @contextmanager
    def one_for(self, uid: int) -> Iterator[None]:
        """Hold a place within the block. WouldBlock: the user can't have one now."""
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
