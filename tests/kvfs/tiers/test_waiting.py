"""Tickets in order."""

from itertools import count

import numpy as np

from kvfs.tiers.tickets import Ticket
from kvfs.tiers.waiting import Waiting

_numbers = count()


def ticket(user: int, priority: int = 0) -> Ticket:
    none = np.empty(0, np.int32)
    return Ticket(
        next(_numbers), priority, user, user, none, 0, lambda _frames: None, lambda: None, lambda _error: None, 0.0
    )


def served(waiting: Waiting) -> list[Ticket]:
    found = []
    while (first := waiting.first()) is not None:
        found.append(first)
        waiting.served(first)
    return found


def waiting_of(*tickets: Ticket) -> Waiting:
    waiting = Waiting()
    for each in tickets:
        waiting.add(each)
    return waiting


def test_users_take_turns_and_priority_goes_first_among_ones_own() -> None:
    a_low, a_high, b, a_middle, b_later = ticket(1), ticket(1, 100), ticket(2), ticket(1, 50), ticket(2)
    waiting = waiting_of(a_low, a_high, b, a_middle, b_later)
    assert len(waiting) == 5
    assert served(waiting) == [a_high, b, a_middle, b_later, a_low]
    assert not waiting


def test_a_user_who_comes_with_ever_more_keeps_nobody_waiting() -> None:
    patient = ticket(2, -100)
    waiting = waiting_of(ticket(1, 100), patient)
    num_before = 0
    while (first := waiting.first()) is not patient:
        assert first is not None
        waiting.served(first)
        waiting.add(ticket(1, 100))
        num_before += 1
    assert num_before == 1


def test_what_was_cancelled_takes_no_turn() -> None:
    gone, other, next_one = ticket(1, 5), ticket(2), ticket(1)
    waiting = waiting_of(gone, other, next_one)
    gone.is_over = True
    assert len(waiting) == 2
    assert served(waiting) == [next_one, other]


def test_who_shrinks_a_file_for_others_goes_before_them() -> None:
    first, answer = ticket(1, 100), ticket(2, -100)
    answer.is_answer = True
    assert served(waiting_of(first, answer)) == [answer, first]
