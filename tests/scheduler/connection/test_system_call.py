"""A system call: answered once, and cancelled as it says, before its answer and behind it."""

import errno
from typing import Any

import pytest

from libsym.abi import Op
from libsym.channel.server import Request
from libsym.errors import Invalid, WouldBlock
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.wire.replies import Reply
from tests.scheduler.bench import ME, Answers


@pytest.fixture
def lip():
    answers: Any = Answers()
    return Lip(1, ME, answers)


def new_call(lip, number=1, handle=0, op=Op.RECV, payload=b""):
    return SystemCall(lip, Request(op, 0, number, handle, (0, 0, 0, 0), payload))


def test_a_second_answer_is_a_fault_of_ours(lip):
    call = new_call(lip)
    call.answer(Reply())
    with pytest.raises(AssertionError, match="answered twice"):
        call.answer(Invalid("no"))
    assert lip.channel.errors == {1: 0}


def test_an_answered_call_waits_no_more_counts_no_bytes_and_can_not_be_cancelled(lip):
    call = new_call(lip, payload=bytes(1000))
    call.count_bytes()
    call.wait(lambda: call.answer(Invalid("cancelled")))
    assert (lip.num_later, lip.under_way.num_bytes, list(lip.calls)) == (1, 1000, [1])
    call.answer(Reply())
    assert (lip.num_later, lip.under_way.num_bytes, list(lip.calls)) == (0, 0, [])
    call.cancel()
    assert lip.channel.errors == {1: 0}


def test_a_call_is_cancelled_once_and_what_it_gave_is_taken_back_behind_its_answer(lip):
    call, done = new_call(lip), []
    call.when_cancelled(lambda: done.append("ended"))
    call.answer(Reply())
    call.when_cancelled(lambda: done.append("taken back"))
    lip.calls[1].cancel()
    call.cancel()
    assert done == ["taken back"]
    assert lip.calls == {}


def test_of_two_calls_with_one_id_the_older_one_lets_go_of_what_it_refers_to(lip):
    older, newer, done = new_call(lip), new_call(lip), []
    older.when_cancelled(lambda: done.append("older"))
    newer.when_cancelled(lambda: done.append("newer"))
    older.answer(Reply())
    lip.calls[1].cancel()
    older.cancel()
    assert done == ["newer"]


def test_no_more_calls_wait_than_may(lip):
    new_call(lip, 1).wait(lambda: None)
    new_call(lip, 2).check_may_wait(2)
    with pytest.raises(WouldBlock):
        new_call(lip, 2).check_may_wait(1)


def test_what_ends_generations_of_a_handle_ends_no_claim_and_no_other_handles_generation(lip):
    done = []
    for number, handle, op in ((1, 5, Op.GENERATE), (2, 6, Op.GENERATE), (3, 5, Op.KV_CLAIM)):
        call = new_call(lip, number, handle, op)
        call.when_cancelled(lambda number=number: done.append(number))
        call.tie(handle)
    lip.end_generations(5)
    assert done == [1]
    assert sorted(lip.calls) == [2, 3]
    assert {handle: len(calls) for handle, calls in lip.tied.items()} == {5: 1, 6: 1}


def test_a_failure_that_is_no_error_of_ours_is_logged_and_told_as_one_inside_the_daemon(lip, caplog):
    call = new_call(lip)

    def fail():
        raise ZeroDivisionError("of all things")

    call.answer_by(fail)
    assert lip.channel.errors == {1: errno.EIO}
    assert "RECV of program 1 failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
