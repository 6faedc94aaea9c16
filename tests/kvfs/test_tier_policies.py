"""Policies of the tiers: the order in which files go down, and the limits of an operator's own policy."""

import contextlib
import logging
import threading
import time

import numpy as np
import pytest

from kvfs.tiers import loading
from kvfs.tiers.loading import Guarded
from kvfs.tiers.policies import cost_based, idleness, lru, ttl
from kvfs.tiers.policy import Files, Gaps
from libsym.errors import Invalid

TOOL_S, PAUSE_S = 0.3, 120.0


def files(idle_s, **others) -> Files:
    """Alike, but for what is said."""
    count = len(idle_s)
    values = {
        "num_pages": 10,
        "idle_s": idle_s,
        "num_uses": 5,
        "gap_s": np.nan,
        "gap_spread_s": np.nan,
        "bring_s": 0.1,
        "compute_s": np.nan,
    } | others
    columns = {name: np.broadcast_to(np.asarray(value, float), count).copy() for name, value in values.items()}
    return Files(**columns, is_open=np.ones(count, np.bool_))


def agents_gaps() -> Gaps:
    """Gaps of an agent: nine of ten of 1,000 are tools, and the rest people."""
    rng = np.random.default_rng(1)
    gaps = Gaps()
    for gap_s in (*rng.lognormal(np.log(TOOL_S), 0.8, 900), *rng.lognormal(np.log(PAUSE_S), 1.2, 100)):
        gaps.add(gap_s)
    return gaps


def first_to_go(rank, of: Files, gaps: Gaps) -> int:
    return int(np.argmin(rank(of, gaps)))


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


# ---- the operator's own ----


def test_an_operators_file_is_a_policy(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy as np\n\ndef rank(files, gaps):\n    return -files.num_pages\n")
    rank = loading.load(str(path))
    assert first_to_go(rank, files([1, 1.0], num_pages=[3, 4]), Gaps()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def rank(files, gaps)\n    pass\n", ":1: SyntaxError: expected ':'"),
        ("x = 1\ny = z\n", ":2: NameError: name 'z' is not defined"),
        ("def other(files, gaps): ...\n", "has no function rank(files, gaps)"),
        (
            "def rank(files, gaps):\n    return files.size\n",
            ":2: AttributeError: 'Files' object has no attribute 'size'",
        ),
        ("def rank(files, gaps):\n    return 1\n", "rank gave an array of shape () for 2 files"),
        ("def rank(files, gaps):\n    return files.num_pages * float('nan')\n", "NaN for 2 files"),
        ("def rank(files, gaps):\n    return ['a', 'b']\n", "ValueError: could not convert string to float"),
        ("x = 1\nraise SystemExit(3)\n", ":2: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_an_operators_file_is_told_with_its_line(tmp_path, text, told):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(Invalid) as failed:
        loading.load(str(path))
    assert str(path) in str(failed.value)
    assert told in str(failed.value)


def test_a_file_that_never_comes_to_its_end_is_told_so(tmp_path, monkeypatch):
    """A daemon reads one again while it serves."""
    monkeypatch.setattr(loading, "LOAD_LIMIT_S", 0.1)
    path = tmp_path / "mine.py"
    path.write_text("while True:\n    pass\n")
    with pytest.raises(Invalid, match=r"took longer than 0\.1 s"):
        loading.load(str(path))


def test_a_name_that_is_none_is_told_with_those_that_are(tmp_path):
    with pytest.raises(Invalid, match="give one of cost, lru, ttl, idle, none, or a file that ends in"):
        loading.load("lfu")
    with pytest.raises(Invalid, match="No such file or directory"):
        loading.load(str(tmp_path / "none.py"))


def endless(_files, _gaps):
    while True:
        pass


def stubborn(_files, _gaps):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.001)


woken = threading.Event()
"""Event that ends the sleep of policies that fell asleep."""


def meddling(found, _gaps):
    found.idle_s[:] = 0
    raise RuntimeError("late")


BAD = {
    "raises": (lambda _files, _gaps: 1 / 0, "ZeroDivisionError: division by zero"),
    "nan": (lambda found, _gaps: found.gap_s, "gave NaN for 3 files"),
    "length": (lambda found, _gaps: found.idle_s[1:], "gave an array of shape (2,) for 3 files"),
    "sleeps": (lambda _files, _gaps: woken.wait(60), "took longer than 50 ms"),
    "endless": (endless, "took longer than 50 ms"),
    "stubborn": (stubborn, "took longer than 50 ms"),
    "meddling": (meddling, "RuntimeError: late"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_policy_that_fails_is_replaced_by_the_default_from_then_on_with_one_line_in_the_log(kind, caplog):
    rank, told = BAD[kind]
    woken.clear()
    limit_s = 0.05 if "took longer" in told else 30.0  # what answers may take its time: the machine may be busy
    guarded = Guarded(rank, lru.rank, limit_s, logging.getLogger("tiers"), "mine.py")
    some = files([3, 1, 2.0])
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        for _ in range(3):
            assert guarded(some, Gaps()).tolist() == [-3, -1, -2]
        assert time.monotonic() - began < 20
    woken.set()
    assert [told in record.getMessage() for record in caplog.records] == [True]
    assert "mine.py" in caplog.text
    assert guarded.failure is not None
    for thread in threading.enumerate():
        if thread.name == "symphony-policy":
            thread.join(5)
            assert not thread.is_alive()


def test_a_policy_that_is_right_decides_from_its_own_thread_until_it_is_closed():
    threads = []

    def rank(found, _gaps):
        threads.append(threading.current_thread())
        return found.idle_s

    guarded = Guarded(rank, lru.rank, 5.0)
    for _ in range(50):
        assert guarded(files([3, 1.0]), Gaps()).tolist() == [3, 1]
    assert guarded.failure is None
    guarded.close()
    threads[0].join(5)
    assert len(set(threads)) == 1
    assert not threads[0].is_alive()
