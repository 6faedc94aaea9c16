"""Log-probabilities of answers and of prompts, in the forms of OpenAI's interfaces and of vLLM."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import libsym as sym
from lips.gateway.engine import Piece
from lips.gateway.gateway import Gateway
from lips.gateway.tenants import Tenant

_CHUNK_TOKENS = 128
_CERTAIN = 0.0
_LEAST = -9999.0
"""Value for minus infinity, which JSON does not have."""


def chat_form(piece: Piece, vocabulary: Sequence[bytes], top: int) -> list[dict[str, Any]]:
    """Return an object for each token, as /v1/chat/completions has it."""
    return token_forms(piece.tokens, piece.dists, vocabulary, top)


def token_forms(
    tokens: Sequence[int], dists: Sequence[sym.ReducedDist | None], vocabulary: Sequence[bytes], top: int
) -> list[dict[str, Any]]:
    """Return an object for each token and the distribution that it was drawn from."""
    found = []
    for token, dist in zip(tokens, dists, strict=True):
        entry = _entry(token, _logprob(token, dist), vocabulary)
        likeliest = dist.topk(top) if dist is not None and top else []
        entry["top_logprobs"] = [_entry(each, max(logprob, _LEAST), vocabulary) for each, logprob in likeliest]
        found.append(entry)
    return found


def _entry(token: int, logprob: float, vocabulary: Sequence[bytes]) -> dict[str, Any]:
    text = vocabulary[token]
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}


def _logprob(token: int, dist: sym.ReducedDist | None) -> float:
    """Return a token's log-probability. A token without a distribution was certain, because a grammar forced it."""
    return _CERTAIN if dist is None else max(dist.logprob(token), _LEAST)


class Offsets:
    """Offsets of a text's tokens, in characters. Tokens within one character have the offset of the character."""

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
    """Return a list for each kind of fact, as /v1/completions has it. `offsets` continue from the text so far."""
    texts = [vocabulary[token].decode(errors="replace") for token in tokens]
    begins = [offsets.of_next(vocabulary[token]) for token in tokens]
    tops: list[dict[str, float] | None] = []
    for token, text, dist in zip(tokens, texts, dists, strict=True):
        likeliest = {} if dist is None or not top else dict(dist.topk(top))
        found = {vocabulary[each].decode(errors="replace"): max(value, _LEAST) for each, value in likeliest.items()}
        found.setdefault(text, _logprob(token, dist))
        tops.append(found)
    logprobs = [_logprob(token, dist) for token, dist in zip(tokens, dists, strict=True)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": begins}


async def scored(gateway: Gateway, tenant: Tenant, prompt: Sequence[int], top: int) -> list[sym.ReducedDist | None]:
    """Return the distribution of each token of a prompt, with the `top` likeliest. None: the first token."""
    gateway.check_length(len(prompt))
    found: list[sym.ReducedDist | None] = [None]
    async with gateway.admission.enter(tenant.name, tenant.limits):
        with tenant.use():
            async with await sym.aio.kv_create() as kv:
                tokens = list(prompt)
                for start in range(0, len(tokens), _CHUNK_TOKENS):
                    chunk = tokens[start : start + _CHUNK_TOKENS]
                    following = tokens[start + 1 : start + _CHUNK_TOKENS + 1]
                    gateway.admission.charge(tenant.name, len(chunk))  # the charge stays if the call fails
                    rows = await sym.aio.pred(
                        kv, chunk, rows="all", top_k=max(top, 1), logprobs=sorted({*following, 0})
                    )
                    found += [rows[index] for index in range(len(following))]
    return found


def prompt_form(
    prompt: Sequence[int], dists: Sequence[sym.ReducedDist | None], vocabulary: Sequence[bytes], top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's form, with token ids as keys. The rank of a token outside the `top` likeliest is null."""
    found = list[dict[str, Any] | None]()
    for token, dist in zip(prompt, dists, strict=True):
        if dist is None:
            found.append(None)
            continue
        likeliest = {each: (logprob, rank) for rank, (each, logprob) in enumerate(dist.topk(top) if top else (), 1)}
        own = likeliest.pop(token, (dist.logprob(token), None))
        entries = {token: own, **likeliest}
        found.append(
            {
                str(each): {
                    "logprob": max(logprob, _LEAST),
                    "rank": rank,
                    "decoded_token": vocabulary[each].decode(errors="replace"),
                }
                for each, (logprob, rank) in entries.items()
            }
        )
    return found
