"""Log-probabilities in the two forms that OpenAI's interfaces have for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import libsym as sym
from lips.gateway.engine import Piece

_CERTAIN = 0.0
LEAST = -9999.0
"""JSON has no infinity."""


def chat_form(piece: Piece, vocabulary: Sequence[bytes], top: int) -> list[dict[str, Any]]:
    """An object for each token."""
    found = []
    for token, dist in zip(piece.tokens, piece.dists, strict=True):
        entry = _entry(token, _logprob(token, dist), vocabulary)
        likeliest = dist.topk(top) if dist is not None and top else []
        entry["top_logprobs"] = [_entry(each, max(logprob, LEAST), vocabulary) for each, logprob in likeliest]
        found.append(entry)
    return found


def _entry(token: int, logprob: float, vocabulary: Sequence[bytes]) -> dict[str, Any]:
    text = vocabulary[token]
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}


def _logprob(token: int, dist: sym.ReducedDist | None) -> float:
    """A token that a grammar forced was certain."""
    return _CERTAIN if dist is None else max(dist.logprob(token), LEAST)


class Offsets:
    """Where each token of a text begins, in characters; those of one character begin where it does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def of_next(self, text: bytes) -> int:
        begins = self._num_chars
        self._num_chars += len(self._decoder.decode(text))
        return begins


def text_form(
    tokens: Sequence[int],
    dists: Sequence[sym.ReducedDist | None],
    vocabulary: Sequence[bytes],
    top: int,
    offsets: Offsets,
) -> dict[str, Any]:
    """A list for each kind of number, as /v1/completions has it. `offsets`: of the text of which these are more."""
    texts = [vocabulary[token].decode(errors="replace") for token in tokens]
    begins = [offsets.of_next(vocabulary[token]) for token in tokens]
    tops: list[dict[str, float] | None] = []
    for token, text, dist in zip(tokens, texts, dists, strict=True):
        likeliest = {} if dist is None or not top else dict(dist.topk(top))
        found = {vocabulary[each].decode(errors="replace"): max(value, LEAST) for each, value in likeliest.items()}
        found.setdefault(text, _logprob(token, dist))
        tops.append(found)
    logprobs = [_logprob(token, dist) for token, dist in zip(tokens, dists, strict=True)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": begins}
