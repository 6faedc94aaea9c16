"""Slots of a file: which are free, and that the books' check sees what contradicts itself."""

import numpy as np
import pytest

from kvfs.durable.slots import Slots


def test_slots_are_taken_from_the_bottom_while_more_come_and_are_free_when_nobody_has_them():
    slots = Slots()
    assert slots.take(3000).tolist() == [*range(3000)]
    slots.need(np.array([5, 6, 6], np.int32))
    slots.disown(np.array([2500, 4, 5, 6], np.int32))
    assert slots.num_used == 2998
    slots.need_no_more(np.array([6, 5], np.int32))  # a version needs 6 still
    slots.hold(np.array([4], np.int32))
    assert slots.take(3).tolist() == [5, 2500, 3000]
    slots.let_go(np.array([4], np.int32))
    assert slots.take(1).tolist() == [4]
    slots.check()


def test_a_slot_that_is_free_although_a_version_needs_it_is_found_out():
    slots = Slots()
    slots.take(2)
    slots.disown(np.array([1], np.int32))
    slots.need(np.array([1], np.int32))
    with pytest.raises(AssertionError, match="a slot is free although"):
        slots.check()
