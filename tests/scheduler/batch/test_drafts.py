"""Drafts from the tokens before."""

import numpy as np
import pytest

from libsym.errors import Invalid
from scheduler._loop import ffi, lib
from scheduler.batch.generation import Draft
from scheduler.batch.views import ints

OFTEN = [token for filler in range(100, 120) for token in (1, 2, filler)]
PROPOSED = {
    "what followed the last tokens before": ([1, 2, 3, 4, 5, 6, 9, 1, 2], 4, 2, [3, 4, 5, 6]),
    "no more than was asked for": ([1, 2, 3, 4, 5, 1, 2], 2, 2, [3, 4]),
    "none where none is asked for": ([1, 2, 3, 4, 5, 1, 2], 0, 2, []),
    "nothing for what was never seen": ([1, 2, 3, 4], 4, 2, []),
    "nothing for nothing": ([], 4, 2, []),
    "nothing for one token": ([1], 4, 2, []),
    "fewer equal tokens than asked for are no sign": ([1, 2, 3, 9, 2], 4, 2, []),
    "as many equal tokens as asked for are one": ([1, 2, 3, 9, 2], 2, 1, [3, 9]),
    "the longest match before the latest": ([7, 8, 1, 2, 50, 9, 1, 2, 60, 7, 8, 1, 2], 1, 2, [50]),
    "of equal matches the latest": ([1, 2, 50, 0, 1, 2, 60, 9, 1, 2], 1, 2, [60]),
    "what repeats itself goes on": ([5, 5, 5], 4, 2, [5, 5, 5, 5]),
    "so does what repeats itself after a while": ([1, 2, 3, 1, 2, 3, 1], 4, 2, [2, 3, 1, 2]),
    "a run that comes again and again is looked up in its latest places": ([*OFTEN, 1, 2], 1, 2, [119]),
    "of more places a longer match is not looked for": ([7, 1, 2, 50, *OFTEN, 7, 1, 2], 1, 2, [119]),
}


@pytest.mark.parametrize(("tokens", "most", "min_match", "expected"), PROPOSED.values(), ids=PROPOSED)
def test_proposed_is(tokens, most, min_match, expected):
    found, given = ffi.new("int32_t[]", 99), ints(np.array(tokens, np.int32))
    count = lib.sym_draft_propose(given, len(tokens), min_match, most, found)
    assert list(found[0:count]) == expected


@pytest.mark.parametrize(("max_tokens", "min_match"), [(0, 2), (65, 2), (4, 0), (4, 17)])
def test_limits_out_of_range_are_refused(max_tokens, min_match):
    with pytest.raises(Invalid):
        Draft(max_tokens, min_match, np.empty(0, np.int32))
