"""How likely a text is: the log-probability of each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

from libsym.arguments import int32
from libsym.channel.scripts import Script
from libsym.errors import Invalid
from libsym.faces import file_call
from libsym.open_file import OpenFile
from libsym.pred import Pred, pred_script, write_script

_CHUNK_TOKENS = 128
"""Each row is asked for all tokens of its chunk: more would be long replies."""


def perplexity(logprobs: Iterable[float]) -> float:
    """How surprising a text was, token by token: the exponential of what its log-probabilities are on average, negated.

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
    """Appends `tokens`; gives the log-probability of each but the first, after all that comes before it.

    `perplexity` is of these. What a file holds already is context: to rank answers to one question, fork the
    file and give the question's last token before each answer.

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
