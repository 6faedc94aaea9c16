"""How many requests for names are answered while the model computes, by a clock that the test turns."""

import pytest

from kvfs.mount.pace import BURST, LOOK_EVERY, MAX_BUCKETS, QUANTUM, RATE_PER_S, STAYS_BUSY_S, Pace

ANN, BOB = 1000, 1001


class Machine:
    """A decoder that is busy or not, and the time."""

    def __init__(self) -> None:
        self.is_busy = True
        self.now_s = 1000.0
        self.pace = Pace(lambda: self.is_busy, lambda: self.now_s)

    def admitted(self, wanted: int, uid: int = ANN) -> int:
        """Return how many of a user's `wanted` simultaneous requests are admitted."""
        return sum(self.pace.admits(self.pace.payer(uid)) for _ in range(wanted))

    def in_a_second(self, *uids: int) -> list[int]:
        """Return how many requests of each user are admitted in a second, of far more."""
        admitted = [0 for _ in uids]
        for _ in range(1000):
            self.now_s += 0.001
            for index, uid in enumerate(uids):
                admitted[index] += self.admitted(20, uid)
        return admitted


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_there_is_no_limit_while_the_model_rests_and_a_step_that_begins_is_noticed_at_once(machine: Machine) -> None:
    machine.is_busy = False
    assert machine.admitted(100_000) == 100_000
    assert machine.pace.is_free
    machine.is_busy = True
    assert machine.admitted(10_000) < BURST + LOOK_EVERY
    assert not machine.pace.is_free


def test_a_burst_comes_through_while_it_computes_and_then_the_rate(machine: Machine) -> None:
    assert machine.admitted(10_000) == BURST
    assert 0 < machine.pace.wait_s(ANN) <= QUANTUM / RATE_PER_S
    assert machine.in_a_second(ANN) == [pytest.approx(RATE_PER_S, abs=QUANTUM)]
    assert machine.admitted(10_000, BOB) == BURST, "a storm of one takes nothing of another's burst"


def test_waiting_as_long_as_it_says_is_enough(machine: Machine) -> None:
    machine.admitted(BURST + 1)
    for _ in range(100):
        machine.now_s += machine.pace.wait_s(ANN) + 1e-6
        assert machine.admitted(1000) == QUANTUM, "and then it is worth the wake-up"


def test_the_moment_between_two_steps_is_not_rest_and_a_rest_fills_the_bucket(machine: Machine) -> None:
    machine.admitted(BURST)
    machine.is_busy = False
    machine.now_s += STAYS_BUSY_S / 2
    assert machine.admitted(10_000) <= RATE_PER_S * STAYS_BUSY_S / 2 + 1
    machine.now_s += 2 * STAYS_BUSY_S
    assert machine.admitted(10_000) == 10_000
    machine.is_busy = True
    assert machine.admitted(10_000) == BURST


def test_users_who_want_more_than_there_is_share_the_rate(machine: Machine) -> None:
    users = range(1000, 1005)
    for uid in users:
        machine.admitted(BURST, uid)
    assert machine.in_a_second(*users) == [pytest.approx(RATE_PER_S / len(users), abs=QUANTUM)] * len(users)


def test_who_asks_now_and_then_is_not_put_off_beside_a_storm(machine: Machine) -> None:
    machine.admitted(10_000)
    for _ in range(1000):
        machine.now_s += 0.01
        assert machine.admitted(2, BOB) == 2
        machine.admitted(100)


def test_what_one_user_leaves_the_others_get(machine: Machine) -> None:
    machine.admitted(BURST)
    machine.admitted(1, BOB)
    machine.now_s += 2 / RATE_PER_S  # Bob's bucket is full again
    machine.admitted(1000)
    assert machine.in_a_second(ANN) == [pytest.approx(RATE_PER_S, abs=QUANTUM)]


@pytest.mark.slow
def test_however_many_users_there_are_their_bursts_are_bounded(machine: Machine) -> None:
    users, wanted = MAX_BUCKETS + 100, BURST + QUANTUM
    admitted = sum(machine.admitted(wanted, uid) for uid in range(100_000, 100_000 + users))
    assert admitted == (MAX_BUCKETS + 1) * BURST
    machine.now_s += 1
    assert sum(machine.admitted(wanted, uid) for uid in range(200_000, 200_000 + users)) <= RATE_PER_S
