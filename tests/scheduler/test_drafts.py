"""Drafts from what was there before."""

import pytest

from libsym.errors import Invalid
from scheduler.batch.drafts import NUM_PLACES, NgramDraft


def draft(tokens, *, max_tokens=4, min_match=2):
    return NgramDraft(tokens, max_tokens=max_tokens, min_match=min_match)


def test_what_followed_the_last_tokens_before_is_proposed():
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2]).propose(10) == [3, 4, 5, 6]


def test_no_more_than_was_asked_for_is_proposed():
    assert draft([1, 2, 3, 4, 5, 1, 2]).propose(2) == [3, 4]
    assert draft([1, 2, 3, 4, 5, 1, 2]).propose(0) == []


def test_nothing_is_proposed_for_what_was_never_seen():
    assert draft([1, 2, 3, 4]).propose(4) == []
    assert draft([]).propose(4) == []
    assert draft([1]).propose(4) == []


def test_fewer_equal_tokens_than_asked_for_are_no_sign():
    assert draft([1, 2, 3, 9, 2], min_match=2).propose(4) == []
    assert draft([1, 2, 3, 9, 2], min_match=1).propose(2) == [3, 9]


def test_the_longest_match_counts_before_the_latest():
    tokens = [7, 8, 1, 2, 50, 9, 1, 2, 60, 7, 8, 1, 2]
    assert draft(tokens).propose(1) == [50]


def test_of_equal_matches_the_latest_counts():
    assert draft([1, 2, 50, 0, 1, 2, 60, 9, 1, 2]).propose(1) == [60]


def test_what_repeats_itself_is_expected_to_go_on():
    assert draft([5, 5, 5]).propose(4) == [5, 5, 5, 5]
    assert draft([1, 2, 3, 1, 2, 3, 1]).propose(4) == [2, 3, 1, 2]


def test_tokens_that_are_added_count_as_the_first_did():
    growing = draft([1, 2, 3])
    growing.add([4, 1])
    assert growing.propose(2) == []
    growing.add([2])
    assert growing.propose(2) == [3, 4]


def test_a_run_that_comes_again_and_again_is_looked_up_in_its_latest_places():
    tokens = [token for filler in range(100, 120) for token in (1, 2, filler)]
    assert draft([*tokens, 1, 2]).propose(1) == [119]
    assert NUM_PLACES < 20


@pytest.mark.parametrize(("max_tokens", "min_match"), [(0, 2), (65, 2), (4, 0), (4, 17)])
def test_limits_out_of_range_are_refused(max_tokens, min_match):
    with pytest.raises(Invalid):
        draft([], max_tokens=max_tokens, min_match=min_match)
