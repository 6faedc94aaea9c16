"""Rows answered by numbers say what the whole row says."""

import errno
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libsym._channel import ffi
from libsym.channel.hot import HOT_FUNCTIONS
from libsym.errors import Invalid, ProtocolError
from libsym.rows.dist import Dist
from libsym.rows.reduced import ReducedDist, RowReducer, reduction_block
from libsym.rows.sampler import Sampler

NAMED = [5, 0, 999, 5]


def row_of(seed: int, size: int = 1000) -> Any:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def reduced(rows: list[Any], sampler: Sampler | None = None, top_k: int | None = 20) -> ReducedDist:
    """Reduce rows and parse the answer, as both sides do."""
    block = reduction_block(top_k, NAMED, sampler.block() if sampler else None)
    reducer = RowReducer(block, len(rows[0]))
    answer = b"".join(reducer.reduce(row.data, index) for index, row in enumerate(rows))
    assert len(answer) == len(rows) * reducer.row_bytes
    return ReducedDist(answer, len(rows), top_k, NAMED)


def test_a_reduced_row_agrees_with_the_whole_one() -> None:
    row = row_of(1)
    whole, part = Dist.of(row), reduced([row], Sampler(top_p=0.9, seed=3))
    assert part.argmax() == whole.argmax()
    assert [token for token, _ in part.topk(20)] == [token for token, _ in whole.topk(20)]
    assert [logprob for _, logprob in part.topk(7)] == pytest.approx([logprob for _, logprob in whole.topk(7)])
    assert part.entropy() == pytest.approx(whole.entropy())
    assert part.token == whole.sample(top_p=0.9, seed=3)
    for token in (*NAMED, part.token, part.argmax()):
        assert part.logprob(token) == pytest.approx(whole.logprob(token), abs=1e-5)
        assert part.logit(token) == pytest.approx(float(row[token]), abs=1e-5)


def test_each_row_draws_with_the_next_number_and_the_last_one_speaks() -> None:
    rows = [row_of(seed) for seed in range(5)]
    part = reduced(rows, Sampler(seed=10))
    assert len(part) == 5
    assert [each.token for each in part] == [Dist.of(row).sample(seed=10, draw=i) for i, row in enumerate(rows)]
    assert part.argmax() == part[-1].argmax() == int(rows[-1].argmax())
    with pytest.raises(IndexError):
        part[5]


def test_a_drawn_tokens_logprob_is_the_models_own_not_the_samplers() -> None:
    row = row_of(2)
    rare = int(row.argmin())
    part = reduced([row], Sampler(temperature=0, logit_bias={rare: 100.0}))
    assert part.token == rare
    assert part.logprob(rare) == pytest.approx(Dist.of(row).logprob(rare), rel=1e-5)


def test_what_was_not_asked_for_says_how_to_ask() -> None:
    part = reduced([row_of(3)], top_k=2)
    other = next(token for token in range(1000) if token not in (*NAMED, *(each for each, _ in part.topk(2))))
    with pytest.raises(Invalid, match="top_k=3"):
        part.topk(3)
    with pytest.raises(Invalid, match=f"logprobs=.{other}."):
        part.logprob(other)
    with pytest.raises(Invalid, match="sampler="):
        _ = part.token
    with pytest.raises(Invalid, match="top_k=1"):
        reduced([row_of(3)], top_k=None).argmax()


def test_the_whole_vocabulary_may_be_asked_for() -> None:
    row = row_of(4)
    assert [token for token, _ in reduced([row], top_k=1000).topk(1000)] == np.lexsort((np.arange(1000), -row)).tolist()


@pytest.mark.parametrize(
    "block",
    [
        b"",
        bytes(15),
        reduction_block(2) + b"x",
        reduction_block(11),
        reduction_block(1, [10]),
        reduction_block(1, [-1]),
        reduction_block(1, [1], Sampler(seed=1).block())[:-1],
        struct.pack("=IIII", 0, 2**32 - 1, 0, 0),
        struct.pack("=IIII", 0, 0, 2, 0),
        struct.pack("=IIII", 0, 0, 0, 1),
        struct.pack("=IIII", 0, 0, 1, 0),
    ],
)
def test_a_forged_request_is_refused(block: bytes) -> None:
    with pytest.raises(Invalid):
        RowReducer(block, 10)


@settings(max_examples=200, deadline=None)
@given(block=st.binary(max_size=120), vocab_size=st.integers(1, 200))
def test_whatever_bytes_come_they_make_a_reducer_or_an_error(block: bytes, vocab_size: int) -> None:
    try:
        reducer = RowReducer(block, vocab_size)
    except Invalid:
        return
    try:
        assert len(reducer.reduce(row_of(0, vocab_size).data, 0)) == reducer.row_bytes
    except Invalid:
        return


def test_c_that_is_given_the_address_answers_with_the_same_bytes() -> None:
    row = row_of(6)
    reducer = RowReducer(reduction_block(5, NAMED, Sampler(top_p=0.9, seed=3).block()), len(row))
    hot = ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)
    at, answer = ffi.cast("sym_reducer *", reducer.address), bytearray(reducer.row_bytes)
    for index in range(3):
        assert hot.reduce(at, ffi.from_buffer("float[]", row), index, ffi.from_buffer(answer)) == 0
        assert bytes(answer) == reducer.reduce(row.data, index)
    row[7] = np.nan
    assert hot.reduce(at, ffi.from_buffer("float[]", row), 0, ffi.from_buffer(answer)) == -errno.EDOM


def test_a_sampler_to_which_nothing_is_possible_is_an_error_of_its_row() -> None:
    block = Sampler(seed=1).block(allowed=bytes(4))
    with pytest.raises(Invalid, match="no token is possible"):
        RowReducer(reduction_block(None, [], block), 10).reduce(row_of(7, 10).data, 0)


def test_reducers_work_at_the_same_time_and_say_what_they_say_alone() -> None:
    rows = [row_of(seed, 20_000) for seed in range(8)]
    block = reduction_block(40, NAMED, Sampler(top_p=0.9, repetition_penalty=1.3, seed=3).block(before=range(50)))
    alone = [RowReducer(block, len(row)).reduce(row.data, 1) for row in rows]

    def again(row: Any) -> bytes:
        reducer = RowReducer(block, len(row))
        return [reducer.reduce(row.data, 1) for _ in range(20)][-1]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(again, rows)) == alone


def test_an_answer_of_the_wrong_size_is_the_daemons_fault() -> None:
    with pytest.raises(ProtocolError):
        ReducedDist(bytes(17), 1)
    with pytest.raises(ProtocolError):
        ReducedDist(b"", 0)


def test_a_row_without_meaning_is_refused() -> None:
    for bad, reason in ((np.nan, "NaN"), (-np.inf, "no token is possible")):
        row: Any = np.full(100, bad, np.float32)
        with pytest.raises(Invalid, match=reason):
            RowReducer(reduction_block(1), 100).reduce(row.data, 0)
