"""Alarms go off in order, at their time, and only once."""

import pytest
import trio
import trio.testing

from kvfs.base.alarms import MIN_CANCELLED, Alarms
from tests.kvfs.clocks import while_alarms_go_off


@pytest.fixture
def alarms() -> Alarms:
    return Alarms()


@while_alarms_go_off
async def test_an_earlier_alarm_wakes_the_task_that_sleeps_for_a_later_one(alarms: Alarms) -> None:
    seen: list[str] = []
    alarms.set(1000, lambda: seen.append("late"))
    await trio.testing.wait_all_tasks_blocked()
    alarms.set(1, lambda: seen.append("early"))
    await trio.sleep(2)
    assert seen == ["early"]


@while_alarms_go_off
async def test_a_cancelled_alarm_stays_silent_and_many_of_them_cost_nothing(alarms: Alarms) -> None:
    seen: list[int] = []
    kept = alarms.set(5, lambda: seen.append(-1))
    for number in range(100 * MIN_CANCELLED):
        alarm = alarms.set(1, lambda number=number: seen.append(number))  # type: ignore[misc]
        alarms.cancel(alarm)
        alarms.cancel(alarm)
    assert len(alarms) == 1
    assert len(alarms._heap) <= 2 * MIN_CANCELLED
    await trio.sleep(6)
    assert seen == [-1]
    alarms.cancel(kept)
    assert len(alarms) == 0


@while_alarms_go_off
async def test_an_action_that_fails_does_not_keep_the_others_from_theirs(
    alarms: Alarms, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    alarms.set(1, lambda: seen.remove("nothing"))
    alarms.set(1, lambda: seen.append("next"))
    await trio.sleep(2)
    assert seen == ["next"]
    assert "an alarm's action failed" in caplog.text


@while_alarms_go_off
async def test_a_crowd_of_alarms_lets_others_have_their_turn(alarms: Alarms) -> None:
    gone: list[int] = []
    turns = 0
    for number in range(100):
        alarms.set(1, lambda number=number: gone.append(number))  # type: ignore[misc]
    await trio.sleep(1)
    while len(gone) < 100:
        turns += 1
        await trio.lowlevel.checkpoint()
    assert turns >= 5
