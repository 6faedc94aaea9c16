"""Bytes that requests count for while they are under way."""

from libsym.abi import HEADER_BYTES, Op
from libsym.channel.server import Request
from scheduler.connection.under_way import CALL_BYTES, cost_of, num_calls_in


def batch(num_calls, payload):
    return Request(Op.PRED_BATCH, 0, 1, 0, (num_calls, 0, 0, 0), payload)


def test_each_call_of_a_batch_counts_however_short_it_is():
    asked = batch(256, bytes(256 * HEADER_BYTES))
    assert num_calls_in(asked) == 256
    assert cost_of(asked) == 256 * (HEADER_BYTES + CALL_BYTES)


def test_a_batch_that_lies_about_its_calls_counts_for_what_its_bytes_may_hold():
    for announced, counted in ((10**18, 2), (-1, 0), (1, 1)):
        asked = batch(announced, bytes(2 * HEADER_BYTES))
        assert (num_calls_in(asked), cost_of(asked)) == (counted, 2 * HEADER_BYTES + counted * CALL_BYTES)


def test_any_other_request_counts_for_its_payload():
    asked = Request(Op.PRED, 0, 1, 1, (100, 0, 0, 0), bytes(400))
    assert (num_calls_in(asked), cost_of(asked)) == (1, 400)
