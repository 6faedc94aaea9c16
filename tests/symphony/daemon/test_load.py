"""The load that a machine publishes."""

import numpy as np
import pytest

from scheduler.batch.accounting import Statistics
from symphony.daemon.load import LoadMeter, coarse


class Costs:
    """A cost model in which a step takes 5 ms, and a chunk of 512 rows takes 256 ms."""

    def predict(self, records):
        return np.where(records["num_rows"] == 1, 5e6, 256e6)


class Batches:
    def __init__(self):
        self.cost, self.statistics, self.num_rows_waiting = Costs(), Statistics(), 0

    def step(self, num_steps, num_calls, each_s):
        self.statistics.num_steps += num_steps
        self.statistics.num_calls_in_steps += num_steps * num_calls
        self.statistics.step_s += num_steps * each_s


@pytest.fixture
def later(monkeypatch):
    """A function that lets time pass."""
    now = [100.0]
    monkeypatch.setattr("symphony.daemon.load.time.monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def numbers(meter):
    found = meter.read()
    return found.calls, found.step_us, found.row_us, found.backlog_us


def test_a_machine_without_work_publishes_what_its_steps_and_rows_cost(later):
    meter = LoadMeter(Batches())
    assert numbers(meter) == (0, coarse(5000), coarse(500), 0)
    later(10)
    assert numbers(meter) == (0, coarse(5000), coarse(500), 0)


def test_a_machine_that_computes_all_the_time_publishes_its_steps(later):
    batches = Batches()
    meter = LoadMeter(batches)
    batches.step(200, 8, 0.015)
    batches.num_rows_waiting = 2000
    later(3)
    assert numbers(meter) == (8, coarse(15_000), coarse(500), coarse(1_000_000))


def test_a_machine_that_computes_half_of_the_time_counts_as_half_as_busy(later):
    batches = Batches()
    meter = LoadMeter(batches)
    batches.step(100, 8, 0.015)
    later(3)
    assert numbers(meter)[:2] == (4, coarse(10_000))


def test_a_load_is_a_mean_over_a_second_however_often_it_is_read(later):
    batches = Batches()
    meter = LoadMeter(batches)
    later(0.5)
    batches.step(10, 8, 0.015)
    assert numbers(meter)[0] == 0
    later(0.5)
    assert numbers(meter)[0] == 2


def test_numbers_are_rounded_so_that_small_changes_write_nothing():
    assert [coarse(number) for number in (0, 0.4, 1.2, 8, 9, 17, 18, 100, 1000, 15_000)] == [
        *(0, 0, 1, 8, 9, 16, 18, 96, 1024, 15_360)
    ]
    for number in range(1, 100_000, 7):
        assert abs(coarse(number) - number) <= number / 16 + 0.5
    assert len({coarse(number) for number in range(1 << 16)}) < 8 * 16
