"""Text that arrives in pieces is the text that arrives at once."""

import random

import pytest

from libsym.calls.text import Detokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve … fin"


def decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def decode_words(tokens: list[int]) -> str:
    """Words with a leading space that the first one loses, as SentencePiece decodes."""
    return " ".join(f"w{token}" for token in tokens)


def decode_fallback(tokens: list[int]) -> str:
    """Bytes of which a run that is not whole becomes replacements altogether."""
    try:
        return bytes(tokens).decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


def stream(decode: object, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)  # type: ignore[arg-type]
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("decode", [decode_bytes, decode_fallback])
def test_characters_of_several_tokens_come_whole(decode: object) -> None:
    pieces = stream(decode, list((TEXT * 5).encode()))
    assert "".join(pieces) == TEXT * 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_spaces_between_words_are_not_lost() -> None:
    tokens = list(range(100))
    assert "".join(stream(decode_words, tokens)) == decode_words(tokens)


def test_broken_text_comes_out_as_it_would_at_once() -> None:
    rng = random.Random(3)
    for _ in range(100):
        tokens = [rng.randrange(256) for _ in range(rng.randrange(120))]
        assert "".join(stream(decode_bytes, tokens)) == decode_bytes(tokens)


def test_a_half_character_at_the_end_comes_with_flush_and_then_a_new_text_begins() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert detokenizer.add(list("aé".encode()[:2])) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.add(list(b"new")) == "new"


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_bytes(tokens)

    stream(decode, list((TEXT * 40).encode()))
    assert longest < 64
