"""Scores of a text: the log-probability of each token, and the perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterable

from libsym.arguments import int32
from libsym.calls.faces import file_call
from libsym.calls.open_file import OpenFile
from libsym.calls.pred import Pred, pred_script, write_script
from libsym.channel.scripts import Script
from libsym.errors import Invalid

_CHUNK_TOKENS = 128
"""Number of tokens in one call. Each row has log-probabilities of all tokens of the chunk, so replies grow fast."""


def perplexity(logprobs: Iterable[float]) -> float:
    """Return the perplexity of a text: exp(-m), where m is the mean log-probability of its tokens.

    >>> round(sym.perplexity([-0.6931, -0.6931]), 3)
    2.0
    """
    found = list(logprobs)
    if not found:
        raise Invalid("perplexity() of no log-probabilities: score() gives one for each token but the first")
    try:
        return math.exp(-math.fsum(found) / len(found))
    except OverflowError:
        return math.inf


@file_call
def score(kv: OpenFile, tokens: Iterable[int]) -> Script[list[float]]:
    """Append `tokens`. Return the log-probability of each token except the first, given all entries and tokens before
    it.

    `perplexity` takes the result. To rank several answers to one question, put the question without its last token into
    a file. For each answer, fork the file, and score the last token and the answer.

    >>> kv = sym.kv_create()
    >>> likely, unlikely = sym.score(kv, [65, 65, 66])
    >>> likely > unlikely, kv.len()
    (True, 3)
    """
    ids, found = int32(tokens, "token").tolist(), list[float]()
    for start in range(0, len(ids), _CHUNK_TOKENS):
        chunk, following = ids[start : start + _CHUNK_TOKENS], ids[start + 1 : start + _CHUNK_TOKENS + 1]
        if following:
            rows = yield from pred_script(Pred(kv, chunk, rows="all", logprobs=sorted(set(following))))
            found += [rows[index].logprob(token) for index, token in enumerate(following)]
        else:
            yield from write_script(kv, chunk)
    return found
