"""Places that users share."""

from contextlib import ExitStack

import pytest

from libsym.errors import WouldBlock
from scheduler.connection.places import Places


def as_many_as_possible(stack, places, uid):
    for count in range(1000):
        try:
            stack.enter_context(places.one_for(uid))
        except WouldBlock:
            return count
    raise AssertionError("there is no end")


def test_a_user_alone_gets_half_and_the_next_half_of_what_is_left():
    places = Places(64, "seats", frozenset())
    with ExitStack() as stack:
        assert [as_many_as_possible(stack, places, uid) for uid in (1, 2, 3, 4)] == [32, 16, 8, 4]
        with pytest.raises(WouldBlock, match="uid 2 has 16 of the daemon's 64 seats, and 4 are left for others"):
            stack.enter_context(places.one_for(2))


def test_who_is_exempt_may_take_the_last_place():
    places = Places(10, "seats", frozenset({0}))
    with ExitStack() as stack:
        assert as_many_as_possible(stack, places, 0) == 10
        with pytest.raises(WouldBlock, match="all 10 seats of the daemon are taken"):
            stack.enter_context(places.one_for(0))


def test_a_place_that_was_left_can_be_taken_again():
    places = Places(2, "seats", frozenset())
    for _ in range(5):
        with places.one_for(7), pytest.raises(WouldBlock), places.one_for(7):
            pass
