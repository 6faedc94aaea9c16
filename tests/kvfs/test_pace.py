"""How many requests for names are answered while the model computes, by a clock that the test turns."""

from __future__ import annotations

import pytest

from kvfs.pace import BURST, LOOK_EVERY, QUANTUM, RATE_PER_S, STAYS_BUSY_S, Pace


class Machine:
    """A decoder that is busy or not, and the time."""

    def __init__(self) -> None:
        self.is_busy = False
        self.now_s = 1000.0
        self.pace = Pace(lambda: self.is_busy, lambda: self.now_s)

    def admitted(self, wanted: int) -> int:
        """How many of so many requests, all at this moment, are admitted."""
        return sum(self.pace.admits() for _ in range(wanted))


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_there_is_no_limit_while_the_model_rests(machine: Machine) -> None:
    assert machine.admitted(100_000) == 100_000


def test_a_burst_comes_through_while_it_computes_and_then_no_more(machine: Machine) -> None:
    machine.is_busy = True
    assert machine.admitted(10_000) == BURST
    assert 0 < machine.pace.wait_s() <= QUANTUM / RATE_PER_S


def test_a_storm_gets_its_rate(machine: Machine) -> None:
    machine.is_busy = True
    machine.admitted(BURST)
    admitted = 0
    for _ in range(1000):
        machine.now_s += 0.001
        admitted += machine.admitted(100)
    assert abs(admitted - RATE_PER_S) <= QUANTUM


def test_waiting_as_long_as_it_says_is_enough(machine: Machine) -> None:
    machine.is_busy = True
    machine.admitted(BURST + 1)
    for _ in range(100):
        machine.now_s += machine.pace.wait_s() + 1e-6
        assert machine.admitted(1000) == QUANTUM, "and then it is worth the wake-up"


def test_the_moment_between_two_steps_is_not_rest(machine: Machine) -> None:
    machine.is_busy = True
    machine.admitted(BURST)
    machine.is_busy = False
    machine.now_s += STAYS_BUSY_S / 2
    assert machine.admitted(10_000) <= RATE_PER_S * STAYS_BUSY_S / 2 + 1
    machine.now_s += STAYS_BUSY_S
    assert machine.admitted(10_000) == 10_000


def test_a_step_that_begins_is_noticed_within_a_few_requests(machine: Machine) -> None:
    machine.admitted(1)
    assert machine.pace.is_free
    machine.is_busy = True
    assert machine.admitted(10_000) < BURST + LOOK_EVERY
    assert not machine.pace.is_free


def test_a_rest_fills_the_bucket(machine: Machine) -> None:
    machine.is_busy = True
    machine.admitted(10_000)
    machine.is_busy = False
    machine.now_s += 2 * STAYS_BUSY_S
    machine.admitted(LOOK_EVERY)
    machine.is_busy = True
    assert machine.admitted(10_000) == BURST
