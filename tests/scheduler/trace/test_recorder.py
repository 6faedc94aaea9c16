"""Events that recordings are told of, and the loss of a recording that is not read."""

import numpy as np
import pytest

from scheduler.trace import recorder as module
from scheduler.trace.recorder import MAX_NOTED, Recorder, Recording
from scheduler.trace.records import ANSWER, NO_DEADLINE, SEAT, STEP, Block, BlockKind, CallKind


def nothing():
    """Report no call in flight."""


def all_of(recording):
    found = []
    while (block := recording.take()) is not None:
        found.append(block)
    return found


def arrive(recorder, call, accounts=(0,)):
    recorder.arrived(call, 10, 20, accounts, 30, 40, 50, CallKind.PREDICTION, -3, None, 1000 + call)


def arrive_all(recorder, *calls):
    for call in calls:
        arrive(recorder, call)


def answers(count):
    return Block.of(BlockKind.ANSWERS, np.zeros(count, ANSWER))


def a_step(num_calls):
    step = np.zeros(1, STEP)
    step["num_calls"] = num_calls
    return step, np.zeros(num_calls, SEAT)


def test_arrivals_are_told_with_those_who_pay():
    recorder = Recorder()
    recording = recorder.begin(nothing)
    arrive(recorder, 1, (7,))
    recorder.arrived(2, 11, 4294967295, (8, 100, 200), 31, 0, 5, CallKind.GENERATION, 100, 77, 1)
    recorder.flush()
    (block,) = all_of(recording)
    assert block.records["call"].tolist() == [1, 2]
    assert block.records["deadline_ns"].tolist() == [NO_DEADLINE, 77]
    assert block.records["uid"].tolist() == [20, 4294967295]
    assert block.records["priority"].tolist() == [-3, 100]
    assert block.records["first_account"].tolist() == [0, 1]
    assert block.details["number"].tolist() == [7, 8, 100, 200]


def test_steps_of_several_turns_are_one_block_whose_seats_count_through():
    recorder = Recorder()
    recording = recorder.begin(nothing)
    for num_calls in (2, 0, 3):
        recorder.steps(*a_step(num_calls))
    recorder.flush()
    (block,) = all_of(recording)
    assert block.kind is BlockKind.STEPS
    assert block.records["first_seat"].tolist() == [0, 2, 2]
    assert len(block.details) == 5


def test_nothing_is_kept_when_the_last_recording_has_ended():
    recorder = Recorder()
    assert not recorder.is_on
    first, second = recorder.begin(nothing), recorder.begin(nothing)
    recorder.end(first)
    assert recorder.is_on
    arrive(recorder, 1)
    recorder.end(second)
    assert not recorder.is_on
    assert [len(all_of(each)) for each in (first, second)] == [0, 1]


def test_a_recording_is_told_of_what_is_under_way_and_others_are_not_told_again():
    recorder = Recorder()
    first = recorder.begin(lambda: arrive(recorder, 1))
    arrive(recorder, 2)
    second = recorder.begin(lambda: arrive_all(recorder, 1, 2))
    arrive(recorder, 3)
    recorder.flush()
    calls = [[call for block in all_of(each) for call in block.records["call"].tolist()] for each in (first, second)]
    assert calls == [[1, 2, 3], [1, 2, 3]]


TOLD = {
    "answers": (lambda recorder: recorder.answered(1, 2, 3, 4), 1),
    "arrivals": (lambda recorder: arrive(recorder, 1), 1),
    "accounts": (lambda recorder: arrive(recorder, 1, tuple(range(50))), 50),
    "steps": (lambda recorder: recorder.steps(*a_step(0)), 1),
    "seats": (lambda recorder: recorder.steps(*a_step(200)), 200),
}


@pytest.mark.parametrize(("tell", "size"), TOLD.values(), ids=TOLD)
def test_what_is_noted_and_not_flushed_is_bounded(tell, size):
    recorder = Recorder()
    recording = recorder.begin(nothing)
    for _ in range(2 * MAX_NOTED // size + 1):
        tell(recorder)
        kept = (recorder._arrivals, recorder._accounts, recorder._answers, recorder._steps)
        assert all(len(each) < MAX_NOTED for each in kept)
        assert recorder._num_seats < MAX_NOTED
    assert recording.take() is not None


def test_a_recording_that_is_not_read_loses_what_comes_and_says_how_much():
    size = answers(100).num_bytes + module._BLOCK_BYTES
    recording = Recording(3 * size)
    for count in (100, 100, 100, 100, 7):
        recording.put(answers(count))
    assert recording._num_bytes <= 3 * size
    found = all_of(recording)
    assert [block.kind for block in found] == [BlockKind.ANSWERS] * 3 + [BlockKind.LOST]
    assert found[-1].records["num_records"].tolist() == [107]
    recording.put(answers(100))
    assert [block.kind for block in all_of(recording)] == [BlockKind.ANSWERS], "what was lost is told once"


def test_a_file_is_told_of_once_and_again_when_it_has_got_a_name():
    recorder = Recorder()
    recording = recorder.begin(nothing)
    for is_named in (False, False, True, True):
        recorder.of_file(30, (7, 64), is_named=is_named)
    recorder.of_file(31, None, is_named=True)
    recorder.flush()
    (block,) = all_of(recording)
    assert block.kind is BlockKind.FILES
    assert block.records.tolist() == [(30, 7, 64, 0), (30, 7, 64, 1), (31, 0, 0, 1)]


def test_a_recording_that_begins_later_is_told_of_all_files_too():
    recorder = Recorder()
    recorder.begin(nothing)
    recorder.of_file(30, None, is_named=False)
    second = recorder.begin(nothing)
    recorder.of_file(30, None, is_named=False)
    recorder.flush()
    (block,) = all_of(second)
    assert block.records["file"].tolist() == [30]


def test_who_reads_version_1_is_told_nothing_of_files():
    recorder = Recorder()
    recording = recorder.begin(nothing, version=1)
    recorder.of_file(30, None, is_named=False)
    arrive(recorder, 1)
    recorder.flush()
    assert [block.kind for block in all_of(recording)] == [BlockKind.ARRIVALS]
