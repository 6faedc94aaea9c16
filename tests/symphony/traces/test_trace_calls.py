"""Calls as a trace has them, and their rows in a drawing."""

from itertools import pairwise

import numpy as np
import pytest

from scheduler.trace.file import read_trace
from symphony.traces.trace_calls import UNKNOWN, calls_of, span_ns
from symphony.traces.trace_rows import rows_of
from symphony.traces.tracing import summary
from tests.symphony.traces.trace_maker import BEGAN_NS, MS, TraceMaker


def by_number(trace):
    """(arrived, ended, computed, rows, is over) in ms, of each call, in order of arrival; by number."""
    calls = calls_of(trace)
    found: dict[int, list[tuple]] = {}
    for place in np.argsort(calls.arrived_ns, kind="stable").tolist():
        times = [(calls.arrived_ns[place] - BEGAN_NS) / MS, (calls.ended_ns[place] - BEGAN_NS) / MS]
        found.setdefault(int(calls.number[place]), []).append(
            (*times, calls.compute_ns[place] / MS, int(calls.num_rows[place]), bool(calls.is_over[place]))
        )
    return found


def test_a_call_waits_is_computed_in_several_steps_and_ends_with_its_answer(tmp_path):
    made = TraceMaker()
    made.arrive(1, 10, tokens=300)
    made.step(20, 30, [(1, 200, 10)], prefill=200)
    made.step(40, 45, [(1, 100, 10)], prefill=100)
    made.answer(1, 46)
    assert by_number(made.trace(tmp_path)) == {1: [(10, 46, 15, 300, True)]}


def test_calls_of_a_loop_that_goes_on_in_c_are_told_apart_by_their_arrivals(tmp_path):
    made = TraceMaker()
    made.arrive(7, 0)
    made.step(1, 2, [(7, 1, 0)])
    made.step(4, 5, [(7, 1, 3)])
    made.step(8, 9, [(7, 1, 6.5)])
    made.answer(7, 9.5)
    assert by_number(made.trace(tmp_path)) == {7: [(0, 2, 1, 1, True), (3, 5, 1, 1, True), (6.5, 9.5, 1, 1, True)]}


def test_calls_without_a_step_and_without_an_answer_are_there_too(tmp_path):
    made = TraceMaker()
    made.arrive(1, 1)
    made.answer(1, 2, 22)
    made.arrive(2, 3)
    made.arrive(3, 4)
    made.step(5, 6, [(3, 1, 4)])
    made.step(8, 9, [(4, 1, 7)])
    trace = made.trace(tmp_path)
    assert by_number(trace) == {
        1: [(1, 2, 0, 0, True)],
        2: [(3, 9, 0, 0, False)],
        3: [(4, 9, 1, 1, False)],
        4: [(7, 9, 1, 1, False)],
    }
    calls = calls_of(trace)
    assert [int(calls.number[place]) for place in np.flatnonzero(calls.arrival == UNKNOWN)] == [4]
    assert [int(calls.number[place]) for place in np.flatnonzero(calls.errno == 22)] == [1]


def test_an_empty_trace_has_no_calls_and_no_rows(tmp_path):
    trace = TraceMaker().trace(tmp_path)
    calls = calls_of(trace)
    assert len(calls) == 0
    assert rows_of(trace, calls).lanes == []
    assert span_ns(trace) == (BEGAN_NS, BEGAN_NS)
    assert summary(trace)["calls"] == {}


def drawn(trace):
    """Call numbers, row by row, lane by lane."""
    calls = calls_of(trace)
    rows = rows_of(trace, calls)
    numbers = [calls.number[rows.order[begin:end]].tolist() for begin, end in pairwise(rows.first.tolist())]
    return {lane.pid: numbers[lane.first_row : lane.first_row + lane.num_rows] for lane in rows.lanes}


def test_a_file_keeps_its_row_and_a_row_that_is_free_is_used_again(tmp_path):
    made = TraceMaker()
    for call, pid, file, began, ended in [
        (1, 5, 1, 0, 2),
        (2, 5, 2, 1, 4),
        (3, 5, 1, 6, 8),  # file 1 again: its row was its own meanwhile
        (4, 5, 3, 4.5, 5),  # file 2 is through
        (5, 6, 9, 0, 10),
    ]:
        made.arrive(call, began, pid=pid, file=file)
        made.answer(call, ended)
    assert drawn(made.trace(tmp_path)) == {5: [[1, 3], [2, 4]], 6: [[5]]}


def test_calls_that_wait_in_one_files_queue_are_beside_each_other(tmp_path):
    made = TraceMaker()
    for call, began, ended in [(1, 0, 5), (2, 1, 7), (3, 6, 8)]:
        made.arrive(call, began)
        made.answer(call, ended)
    assert drawn(made.trace(tmp_path)) == {1: [[1, 3], [2]]}


@pytest.mark.parametrize("seed", range(5))
def test_no_two_bars_of_a_row_overlap_and_every_call_has_one_place(tmp_path, seed):
    rng = np.random.default_rng(seed)
    made = TraceMaker()
    for call in range(1, 400):
        began = rng.random() * 100
        made.arrive(call, began, pid=int(rng.integers(1, 4)), file=int(rng.integers(1, 60)))
        made.answer(call, began + rng.exponential(2))
    trace = made.trace(tmp_path)
    calls = calls_of(trace)
    rows = rows_of(trace, calls)
    assert sorted(rows.order.tolist()) == list(range(len(calls)))
    for begin, end in pairwise(rows.first.tolist()):
        some = rows.order[begin:end]
        assert (calls.arrived_ns[some[1:]] >= calls.ended_ns[some[:-1]]).all()


def test_a_summary_has_think_times_waits_and_the_error_of_predictions(tmp_path):
    made = TraceMaker()
    made.arrive(1, 0)
    made.step(2, 6, [(1, 1, 0)])
    made.step(16, 20, [(1, 1, 15)])
    made.answer(1, 20)
    numbers = summary(made.trace(tmp_path))
    assert numbers["think_s"] == {"num": 1, "median": pytest.approx(0.009), "p99": pytest.approx(0.009)}
    assert numbers["calls"]["pred"]["num"] == 2
    assert numbers["calls"]["pred"]["waited_s"]["median"] == pytest.approx(0.0015)
    assert numbers["prediction_error"]["median"] == pytest.approx(0.1)
    assert numbers["busy_share"] == pytest.approx(0.4)


def test_a_trace_whose_arrivals_are_lost_is_drawn_without_programs(tmp_path):
    made = TraceMaker()
    made.step(1, 2, [(5, 1, 0)])
    path = made.write(tmp_path / "x.trace")
    assert list(drawn(read_trace(path))) == [UNKNOWN]
