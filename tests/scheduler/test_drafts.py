"""Drafts from the tokens before."""

import numpy as np
import pytest

from libsym.errors import Invalid
from scheduler._loop import ffi, lib
from scheduler.batch.generation import Draft
from scheduler.batch.member import ints


def propose(tokens, most, *, min_match=2):
    found = ffi.new("int32_t[]", 99)
    return list(found[0 : lib.sym_draft_propose(ints(np.array(tokens, np.int32)), len(tokens), min_match, most, found)])


def test_what_followed_the_last_tokens_before_is_proposed():
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2], 4) == [3, 4, 5, 6]


def test_no_more_than_was_asked_for_is_proposed():
    assert propose([1, 2, 3, 4, 5, 1, 2], 2) == [3, 4]
    assert propose([1, 2, 3, 4, 5, 1, 2], 0) == []


def test_nothing_is_proposed_for_what_was_never_seen():
    assert propose([1, 2, 3, 4], 4) == []
    assert propose([], 4) == []
    assert propose([1], 4) == []


def test_fewer_equal_tokens_than_asked_for_are_no_sign():
    assert propose([1, 2, 3, 9, 2], 4, min_match=2) == []
    assert propose([1, 2, 3, 9, 2], 2, min_match=1) == [3, 9]


def test_the_longest_match_counts_before_the_latest():
    tokens = [7, 8, 1, 2, 50, 9, 1, 2, 60, 7, 8, 1, 2]
    assert propose(tokens, 1) == [50]


def test_of_equal_matches_the_latest_counts():
    assert propose([1, 2, 50, 0, 1, 2, 60, 9, 1, 2], 1) == [60]


def test_what_repeats_itself_is_expected_to_go_on():
    assert propose([5, 5, 5], 4) == [5, 5, 5, 5]
    assert propose([1, 2, 3, 1, 2, 3, 1], 4) == [2, 3, 1, 2]


def test_a_run_that_comes_again_and_again_is_looked_up_in_its_latest_places():
    tokens = [token for filler in range(100, 120) for token in (1, 2, filler)]
    assert propose([*tokens, 1, 2], 1) == [119]
    longer = [7, 1, 2, 50, *tokens, 7, 1, 2]
    assert propose(longer, 1) == [119], "of more places a longer match is not looked for"


@pytest.mark.parametrize(("max_tokens", "min_match"), [(0, 2), (65, 2), (4, 0), (4, 17)])
def test_limits_out_of_range_are_refused(max_tokens, min_match):
    with pytest.raises(Invalid):
        Draft(max_tokens, min_match, np.empty(0, np.int32))
