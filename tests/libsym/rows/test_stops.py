"""Texts that end a generation."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libsym._channel import ffi
from libsym.channel.hot import HOT_FUNCTIONS
from libsym.errors import Invalid
from libsym.rows.stops import StopTexts, TokenTexts

LETTERS = [bytes([code]) for code in range(256)]


def watch(texts: Sequence[str], token_texts: Sequence[bytes] = LETTERS) -> StopTexts:
    return StopTexts(texts, TokenTexts(token_texts))


def tokens_until_found(stops: StopTexts, tokens: Iterable[int]) -> int | None:
    for count, token in enumerate(tokens, 1):
        if stops.add(token):
            return count
    return None


def test_generations_that_share_a_vocabulary_watch_for_themselves_and_what_was_found_stays_found() -> None:
    tokens = TokenTexts(LETTERS)
    one, other = StopTexts(["ab", "x"], tokens), StopTexts(["ab"], tokens)
    assert not one.add(ord("a"))
    assert not other.add(ord("b"))
    assert one.add(ord("b"))
    assert one.add(ord("x"))
    assert (one.found, other.found) == (0, None)


def test_the_vocabulary_lives_as_long_as_somebody_watches() -> None:
    stops = watch(["END"])  # nobody else has the table
    noise = [bytes(1024) for _ in range(1000)]
    assert tokens_until_found(stops, b"THE END") == 7
    assert len(noise) == 1000


@pytest.mark.parametrize("text", ["", "half \ud800"])
def test_what_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        watch(["fine", text])


@pytest.mark.parametrize("token", [-1, 2, 1 << 31])
def test_a_token_that_the_model_has_not_is_refused(token: int) -> None:
    with pytest.raises(Invalid, match="not in the vocabulary of 2"):
        watch(["a"], [b"a", b"b"]).add(token)


def test_c_that_is_given_the_address_watches_with_the_same() -> None:
    stops = watch(["ab"])
    hot = ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)
    at = ffi.cast("sym_stops *", stops.address)
    assert [hot.stops_add(at, token) for token in (*b"ab", 256, -1)] == [-1, 0, -22, -22]
    assert stops.found == 0


# -- beside a search in plain Python --


def plainly(texts: Sequence[bytes], pieces: Iterable[bytes]) -> tuple[int, int] | None:
    so_far = b""
    for count, piece in enumerate(pieces, 1):
        so_far += piece
        begins = [(so_far.find(text), index) for index, text in enumerate(texts)]
        complete = [each for each in begins if each[0] >= 0]
        if complete:
            return count, min(complete)[1]
    return None


letters = st.text("abé", min_size=1, max_size=7)  # so few that texts overlap themselves and each other


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(letters, max_size=6),
    vocabulary=st.lists(st.text("abé", max_size=4).map(str.encode) | st.sampled_from([b"\xc3", b"\xa9"]), min_size=1),
    data=st.data(),
)
def test_any_texts_in_any_tokens_are_found_where_a_plain_search_finds_them(texts, vocabulary, data):
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=40))
    stops = watch(texts, vocabulary)
    count = tokens_until_found(stops, tokens)
    found = None if count is None else (count, stops.found)
    assert found == plainly([text.encode() for text in texts], [vocabulary[token] for token in tokens])


@settings(max_examples=100, deadline=None)
@given(text=letters, times=st.integers(1, 300), cuts=st.sets(st.integers(0, 2000), max_size=30), before=letters)
def test_long_texts_that_repeat_themselves_are_found_however_they_are_cut(text, times, cuts, before):
    stop, whole = text * times, (before + text * (times + 2)).encode()
    ends = sorted({cut for cut in cuts if cut < len(whole)} | {len(whole)})
    pieces = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    stops = watch([stop], pieces)
    count = tokens_until_found(stops, range(len(pieces)))
    assert count is not None
    assert (count, stops.found) == plainly([stop.encode()], pieces)
