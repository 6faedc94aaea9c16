"""A patch that nothing calls fails its test."""

from typing import Any

import pytest

from kvfs.pages import turns
from scheduler.status import held
from tests.patches import Patches, guard


@pytest.fixture
def patches():
    found = Patches()
    yield found
    found.undo()


def test_a_function_of_our_own_that_is_replaced_has_to_be_called(patches):
    patches.setattr(held, "perf_counter", lambda: 1.0)
    patches.setattr(held.HeldTimes, "info", lambda self: self)
    patches.setattr(held, "NUM_WORST", 3)
    patches.setattr(turns, "fitting", guard(lambda: None))
    assert patches.uncalled == ["scheduler.status.held.perf_counter", "HeldTimes.info"]
    times: Any = held.HeldTimes()
    assert times.info() is times
    assert patches.uncalled == ["scheduler.status.held.perf_counter"]
    times.after_io_wait(0.0)
    assert patches.uncalled == []


def test_what_is_not_ours_is_not_looked_at(patches):
    patches.setattr(pytest, "skip", lambda: None)
    assert patches.uncalled == []
