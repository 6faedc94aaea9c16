"""How long tasks hold the trio thread."""

import re

import pytest
import trio

from scheduler.status import held
from scheduler.status.held import BOUNDS_S, HeldTimes


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

    class Waits(trio.abc.Instrument):
        def before_io_wait(self, timeout):
            clock.now_s += 5.0

    trio.run(main, instruments=[Waits()])
    info = times.info()
    worst = info["worst"]
    assert info["num_long"] == 13, "each of several tasks of a turn counts by itself, and waits do not"
    assert info["total_s"] == pytest.approx(12 * 0.002 + 0.066 + 0.5009)
    assert [round(1000 * each["held_s"]) for each in worst] == [500, *range(13, 4, -1)]
    took = [1000 * each["processor_s"] for each in worst]
    assert 400 <= round(took[0], 3) <= 401, "with what another task took just before"
    assert took[1:] == pytest.approx([1] * 9)
    assert worst[0]["task"].startswith("tests.scheduler.status.test_held.test_the_longest")
    assert re.fullmatch(r".*main tests\.scheduler\.status\.test_held:\d+", worst[1]["task"])
