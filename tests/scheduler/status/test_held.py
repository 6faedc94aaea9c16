"""How long tasks hold the trio thread."""

import re

import pytest
import trio

from scheduler.status import held
from scheduler.status.held import BOUNDS_S, HeldTimes
from scheduler.status.metrics import exposition, histogram


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(held, "perf_counter", found)
    return found


@pytest.fixture
def processor(monkeypatch):
    found = Clock()
    monkeypatch.setattr(held, "thread_time", found)
    return found


def held_for(clock, *seconds):
    times = HeldTimes()

    async def main():
        for each in seconds:
            clock.now_s = 0.0
            times.after_io_wait(0.0)
            clock.now_s = each
            times.after_task_step(trio.lowlevel.current_task())

    trio.run(main)
    return times


def test_bounds_double_up_to_a_second_and_a_millisecond_is_one_of_them():
    assert [round(1000 * bound, 3) for bound in BOUNDS_S[:4]] == [0.125, 0.25, 0.5, 1.0]
    assert BOUNDS_S[-1] == pytest.approx(1.024)


@pytest.mark.parametrize(
    ("seconds", "place"), [(0.0, 0), (0.000125, 0), (0.00013, 1), (0.001, 3), (0.0011, 4), (1.024, 13), (60.0, 14)]
)
def test_each_time_counts_for_the_first_bound_that_it_is_within(clock, seconds, place):
    assert held_for(clock, seconds).nums == [int(index == place) for index in range(len(BOUNDS_S) + 1)]


def test_what_is_told_is_how_many_were_long_and_the_longest(clock):
    info = held_for(clock, 0.00001, 0.001, 0.003, 0.002, 0.0002).info()
    assert (info["num"], info["num_long"], info["longest_s"]) == (5, 2, 0.003)
    assert info["total_s"] == pytest.approx(0.00621)
    assert sum(info["nums"]) == 5


def test_each_task_of_a_turn_is_measured_by_itself_and_waits_are_not(clock):
    times = HeldTimes()

    async def hold(seconds):
        clock.now_s += seconds

    async def main():
        times.install()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, 0.003)
            nursery.start_soon(hold, 0.006)
        await trio.lowlevel.checkpoint()

    class Waits(trio.abc.Instrument):
        def before_io_wait(self, timeout):
            clock.now_s += 5.0

    trio.run(main, instruments=[Waits()])
    info = times.info()
    assert (info["num_long"], info["longest_s"]) == (2, pytest.approx(0.006))
    assert info["total_s"] == pytest.approx(0.009)
    assert info["num"] > 2


def test_the_longest_are_told_with_their_tasks_and_the_processors_time(clock, processor):
    times = HeldTimes()

    async def busy(seconds, processor_s):
        clock.now_s += seconds
        processor.now_s += processor_s
        await trio.lowlevel.checkpoint()

    async def main():
        times.install()
        for number in range(12):
            await busy(0.002 + number / 1000, 0.001)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy, 0.5, 0.4)
            nursery.start_soon(busy, 0.0009, 0.0009)

    trio.run(main)
    worst = times.info()["worst"]
    assert [round(1000 * each["held_s"]) for each in worst] == [500, *range(13, 4, -1)]
    took = [1000 * each["processor_s"] for each in worst]
    assert 400 <= round(took[0], 3) <= 401, "with what another task took just before"
    assert took[1:] == pytest.approx([1] * 9)
    assert worst[0]["task"].startswith("tests.scheduler.status.test_held.test_the_longest")
    assert re.fullmatch(r".*main tests\.scheduler\.status\.test_held:\d+", worst[1]["task"])


def test_as_a_metric_the_bounds_are_seconds(clock):
    times = held_for(clock, 0.0001, 0.0002, 0.5)
    text = exposition((histogram("held_seconds", "Held.", BOUNDS_S, times.nums, times.total_s),))
    assert 'held_seconds_bucket{le="0.000125"} 1\n' in text
    assert 'held_seconds_bucket{le="0.00025"} 2\n' in text
    assert 'held_seconds_bucket{le="1.024"} 3\nheld_seconds_bucket{le="+Inf"} 3\n' in text
    assert "held_seconds_sum 0.500300\nheld_seconds_count 3\n" in text
