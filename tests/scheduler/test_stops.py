"""Texts that end a generation."""

import pytest

from libsym.errors import Invalid
from scheduler.batch.stops import StopTexts

LETTERS = [bytes([code]) for code in range(256)]


def tokens_until_found(stops, tokens):
    """How many tokens it took; None: never."""
    for count, token in enumerate(tokens, 1):
        if stops.add(token):
            return count
    return None


def test_a_stop_text_is_found_when_its_last_byte_has_come():
    stops = StopTexts(["END"], LETTERS)
    assert tokens_until_found(stops, b"THE END OF IT") == 7
    assert stops.found == 0


def test_it_may_begin_and_end_in_the_middle_of_tokens():
    texts = [b"one. Us", b"er", b": two", b"x"]
    assert tokens_until_found(StopTexts(["User:"], texts), [3, 0, 1, 2, 3]) == 4


def test_characters_of_several_bytes_are_found_across_tokens():
    assert tokens_until_found(StopTexts(["é€"], LETTERS), "aé€".encode()) == 6


def test_of_several_in_one_token_the_one_that_began_first_counts():
    stops = StopTexts(["b", "a"], [b"xxab"])
    assert stops.add(0)
    assert stops.found == 1


def test_what_almost_was_one_is_none():
    assert tokens_until_found(StopTexts(["aab"], LETTERS), b"aacaaaab") == 8
    assert tokens_until_found(StopTexts(["aab"], LETTERS), b"abababab") is None


def test_without_stop_texts_nothing_stops():
    assert tokens_until_found(StopTexts([], LETTERS), b"anything") is None


def test_a_stop_text_of_one_byte_is_found_in_each_token_anew():
    assert tokens_until_found(StopTexts(["\n"], [b"ab", b"c\n"]), [0, 0, 1]) == 3


@pytest.mark.parametrize("text", ["", "half \ud800"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(Invalid):
        StopTexts(["fine", text], LETTERS)
