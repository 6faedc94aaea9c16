"""Policies of the tiers: the order in which files go down."""

import numpy as np
import pytest

from kvfs.tiers import loading
from kvfs.tiers.policies import cost_based, idleness, lru, ttl
from kvfs.tiers.policy import Gaps
from tests.kvfs.tiers.idle_files import files, first_to_go

TOOL_S, PAUSE_S = 0.3, 120.0


def agents_gaps() -> Gaps:
    """Gaps of an agent: nine of ten of 1,000 are tools, and the rest people."""
    rng = np.random.default_rng(1)
    gaps = Gaps()
    for gap_s in (*rng.lognormal(np.log(TOOL_S), 0.8, 900), *rng.lognormal(np.log(PAUSE_S), 1.2, 100)):
        gaps.add(gap_s)
    return gaps


@pytest.mark.parametrize("name", loading.NAMES)
def test_what_lies_idle_longest_goes_first_where_nothing_else_is_known(name):
    worth = loading.load(name)(files([500, 7, 90, 40_000.0]), Gaps())
    assert np.argsort(worth).tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("name", loading.NAMES)
def test_a_policy_gives_numbers_for_any_files(name):
    rng = np.random.default_rng(2)
    some = files(
        rng.exponential(100, 300) * (rng.random(300) < 0.9),
        num_uses=rng.integers(0, 50, 300),
        gap_s=np.where(rng.random(300) < 0.5, np.nan, rng.exponential(1, 300)),
        gap_spread_s=np.where(rng.random(300) < 0.5, np.nan, 0),
        bring_s=rng.exponential(1, 300) * (rng.random(300) < 0.9),
        num_pages=rng.integers(0, 200, 300),
    )
    for gaps in (Gaps(), agents_gaps()):
        assert np.isfinite(loading.NAMES[name](some, gaps)).all()
    assert loading.NAMES[name](files([]), agents_gaps()).shape == (0,)


def test_by_cost_a_program_in_a_tool_stays_before_one_whose_user_pauses():
    """The files have no gap of their own. The first has been idle as long as tools take, the second longer."""
    assert first_to_go(cost_based.rank, files([0.4, 20.0]), agents_gaps()) == 1


def test_by_cost_a_file_that_comes_back_at_a_known_time_stays_although_it_is_idle_longer():
    some = files([50, 20.0], gap_s=[60, np.nan], gap_spread_s=[2, np.nan])
    assert first_to_go(cost_based.rank, some, agents_gaps()) == 1
    assert first_to_go(lru.rank, some, agents_gaps()) == 0


def test_by_cost_a_program_whose_tools_were_short_is_not_judged_by_them_when_it_has_outlived_them():
    some = files([30.0, 30.0], gap_s=[0.1, 20.0], gap_spread_s=[0.05, 10.0])
    gaps = agents_gaps()
    assert first_to_go(cost_based.rank, some, gaps) == 0
    alone = cost_based.chance_a_second(files([30.0]), gaps)
    outlived = cost_based.chance_a_second(files([30.0], gap_s=0.1, gap_spread_s=0.05), gaps)
    assert outlived == pytest.approx(alone, rel=0.01)


def test_by_cost_what_is_brought_back_faster_goes_first_and_so_does_what_frees_more_for_the_same_time():
    assert first_to_go(cost_based.rank, files([1, 1.0], bring_s=[0.1, 0.01]), agents_gaps()) == 1
    assert first_to_go(cost_based.rank, files([1, 1.0], num_pages=[10, 1000]), agents_gaps()) == 1


def test_by_cost_the_chance_is_that_of_patience_over_both_modes():
    """Two lengths of gaps: the best patience of a fresh file ends with the tools, that of an older one with all."""
    gaps = Gaps()
    for _ in range(9_000):
        gaps.add(0.25)
    for _ in range(1_000):
        gaps.add(256.0)
    fresh, old = cost_based.chance_a_second(files([1e-4, 1.0]), gaps)
    assert fresh == pytest.approx(0.9 / 0.25, rel=0.05)
    assert old == pytest.approx(1 / 256, rel=0.05)


def test_the_time_to_live_ends_between_the_gaps_of_tools_and_those_of_people():
    assert 1.5 < ttl.time_to_live_s(agents_gaps()) < 25
    assert ttl.time_to_live_s(Gaps()) == ttl.DEFAULT_S


def test_within_its_time_to_live_a_file_stays_and_after_it_goes():
    some = files([0.5, 60.0, 1.0, 900.0])
    assert np.argsort(ttl.rank(some, agents_gaps())).tolist() == [3, 1, 0, 2]


def test_by_idleness_one_long_tool_makes_no_busy_program_idle_at_once():
    some = files([5.0, 1.0], gap_s=[0.1, 90.0], gap_spread_s=[0.1, 10.0])
    assert first_to_go(idleness.rank, some, agents_gaps()) == 1
    assert first_to_go(lru.rank, some, agents_gaps()) == 0
