"""The judge of names: a sync promises no name of a file that is gone when the sync returns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kvfs.durable.allowed_names import NamesThatAreThere
from tests.kvfs.durable.events import ROOT, Key, Operation, Put, Sync

A, B = (ROOT, b"a"), (ROOT, b"b")


def happened(base: dict[Key, int], operations: Sequence[Operation], sync: Sync, found: dict[Key, int]) -> list[int]:
    there = NamesThatAreThere(base, operations, [sync], found, sync.ended or 0, {ROOT})
    return [each.moment for each in there.happened()]


def test_a_file_that_is_removed_while_everything_is_synced_may_never_have_been():
    operations = [
        Operation(1, (Put(A, None, 5),)),
        Operation(3, (Put(B, None, 6),)),
        Operation(4, (Put(A, 5, None),)),
    ]
    sync = Sync(None, 2, ended=5, named=frozenset({ROOT}), unnamed=frozenset({5}))
    assert happened({}, operations, sync, {}) == []
    assert happened({}, operations, sync, {A: 5}) == [1]


def test_a_name_that_was_taken_before_everything_was_synced_does_not_come_back_with_a_file_that_goes_meanwhile():
    operations = [Operation(1, (Put(A, 5, None),)), Operation(3, (Put(B, 5, None),))]
    sync = Sync(None, 2, ended=4, named=frozenset({ROOT}), unnamed=frozenset({5}))
    with pytest.raises(AssertionError, match="1/a leads to 5"):
        happened({A: 5, B: 5}, operations, sync, {A: 5, B: 5})


def test_a_removal_before_everything_was_synced_has_happened():
    operations = [Operation(1, (Put(A, 5, None),))]
    sync = Sync(None, 2, ended=3, named=frozenset({ROOT}))
    assert happened({A: 5}, operations, sync, {}) == [1]
    with pytest.raises(AssertionError, match="1/a leads to 5"):
        happened({A: 5}, operations, sync, {A: 5})
