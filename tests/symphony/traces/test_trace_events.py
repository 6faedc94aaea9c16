"""A trace as a timeline for viewers: Trace Event JSON."""

import json

import pytest

from symphony.traces.trace_events import events_of, text_of
from tests.symphony.traces.trace_maker import TraceMaker


@pytest.fixture
def made():
    """Two programs: a prefill and then a call, and one that fails."""
    made = TraceMaker()
    made.arrive(1, 0, pid=71, file=3, tokens=100)
    made.step(20, 40, [(1, 100, 0)], prefill=100)
    made.answer(1, 40)
    made.arrive(2, 50, pid=71, file=3)
    made.step(60, 70, [(2, 1, 50)])
    made.answer(2, 70)
    made.arrive(3, 10, pid=72, file=4)
    made.answer(3, 100, 110)
    return made


def slices(trace, name=None):
    found = [each for each in events_of(trace) if each["ph"] == "X" and each["name"] != "step"]
    return [each for each in found if name in {None, each["name"]}]


def test_the_file_is_json_with_the_header_and_every_event(made, tmp_path):
    trace = made.trace(tmp_path)
    found = json.loads("".join(text_of(trace, "a.trace")))
    assert found["otherData"]["title"] == "a.trace"
    assert found["otherData"]["model"] == "made </script> up"
    assert found["traceEvents"] == list(events_of(trace))
    assert [each["args"]["name"] for each in found["traceEvents"] if each["ph"] == "M"] == [
        "steps",
        "program 71 of uid 0",
        "program 72 of uid 0",
    ]


def test_steps_are_slices_and_a_curve(made, tmp_path):
    steps = [each for each in events_of(made.trace(tmp_path)) if each["pid"] == 0]
    assert [(each["ts"], each["dur"]) for each in steps if each["ph"] == "X"] == [(20_000, 20_000), (60_000, 10_000)]
    curve = [(each["ts"], each["args"]["prefill"], each["args"]["decode"]) for each in steps if each["ph"] == "C"]
    assert curve == [(20_000, 100, 0), (40_000, 0, 0), (60_000, 0, 1), (70_000, 0, 0)]


def test_a_call_is_a_slice_of_its_program_and_what_computed_it_lies_within(made, tmp_path):
    found = [(each["pid"], each["name"], each["ts"], each["dur"]) for each in slices(made.trace(tmp_path))]
    assert found == [
        (1, "pred", 0, 40_000),
        (1, "computed", 20_000, 20_000),
        (1, "pred", 50_000, 20_000),
        (1, "computed", 60_000, 10_000),
        (2, "pred", 10_000, 90_000),
    ]
    *_, failed = slices(made.trace(tmp_path), "pred")
    assert failed["args"] | {"errno": 110, "file": 4, "calls": 1, "steps": 0} == failed["args"]


def test_steps_that_follow_each_other_closely_are_one_slice(tmp_path):
    made = TraceMaker()
    made.arrive(1, 0)
    for began in (0, 11, 22, 40, 51):  # of 10 ms; 8 ms lie before the fourth
        made.step(began, began + 10, [(1, 1, 0)])
    found = slices(made.trace(tmp_path), "computed")
    assert [(each["args"]["first_step"], each["args"]["steps"]) for each in found] == [(0, 3), (3, 2)]


def test_calls_of_a_loop_share_a_slice_until_their_program_thinks(tmp_path):
    made = TraceMaker()
    for number in range(20_000):
        came = number + 500 * (number >= 10_000)
        made.step(came + 0.1, came + 0.9, [(1, 1, came)])
    made.arrive(1, 0)
    first, second = slices(made.trace(tmp_path), "pred")
    assert [each["args"]["calls"] for each in (first, second)] == [10_000, 10_000]
    assert (first["ts"], second["ts"]) == (0, 10_500_000)


def test_what_was_before_the_recording_is_told_apart(tmp_path):
    made = TraceMaker()
    made.arrive(1, -500)
    made.step(20, 40, [(1, 1, -500)])
    made.answer(1, 40)
    trace = made.trace(tmp_path)
    assert json.loads("".join(text_of(trace, "x")))["otherData"]["recorded_us"] == 500_000
    assert slices(trace, "pred")[0]["ts"] == 0


def test_a_step_that_goes_on_with_an_answered_call_has_no_time_of_it(tmp_path):
    made = TraceMaker()
    made.arrive(1, 0)
    made.answer(1, 5, 125)
    made.step(10, 20, [(1, 1, 0)])
    assert [(each["ts"], each["dur"]) for each in slices(made.trace(tmp_path))] == [(0, 5_000), (5_000, 0)]


def test_numbers_that_are_none_and_kinds_that_nobody_knows_are_no_error(made, tmp_path):
    trace = made.trace(tmp_path)
    trace.steps["predicted_ns"][0] = float("nan")
    trace.arrivals["kind"] = 99
    found = json.loads("".join(text_of(trace, "x")), parse_constant=pytest.fail)["traceEvents"]
    assert {each["name"] for each in found if each["ph"] == "X"} == {"step", "99", "computed"}
