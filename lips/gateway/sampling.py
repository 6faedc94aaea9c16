"""Sampling settings of a request, by the names of OpenAI's interfaces and of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields

MAX_TOP = 20
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "n_predict")
MAX_N = 128
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 64
_MAX_WHOLE = (1 << 31) - 1
_LEAST_PART = 1e-9
"""A probability so small that one token reaches it. top_p 0 and typical_p 0 mean this probability."""
_NUM_PENALIZED = 64
"""Number of tokens that llama.cpp's repeat_penalty covers if repeat_last_n is not given."""
_DRY = sym.Dry()
"""Default DRY settings, the same as in llama.cpp."""
_NEVER = -100.0
"""A bias that bans a token in OpenAI's interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of one request. Settings that an interface lacks keep these defaults."""

    sampler: sym.Sampler
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer, set by `constraints.bounded`, which knows the vocabulary."""
    stop_at_end: bool = True
    keeps_stop: bool = False
    """Whether the answer includes the stop text that ended it."""
    shows_special: bool = True
    """Whether special tokens appear in the answer's text."""
    max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    """Number of the likeliest tokens to return beside each drawn token; None: no log-probabilities."""
    seed: int | None = None
    grammar: sym.Grammar | None = None
    is_format: bool = False
    """Whether a grammar fixes the answer's format, so that no text in it is a call."""


def sampling(
    fields: Fields, defaults: Mapping[str, Any], *, max_tokens_names: tuple[str, ...] = MAX_TOKENS_NAMES
) -> Sampling:
    """Return the settings that all interfaces share; for `logprobs` see `chat_logprobs` and `text_logprobs`."""
    temperature = fields.number("temperature", 0, 100, defaults.get("temperature", 1.0))
    top_k = fields.whole("top_k", -1, _MAX_WHOLE, defaults.get("top_k"))
    top_p = fields.number("top_p", 0, 1, defaults.get("top_p"))
    min_p = fields.number("min_p", 0, 1, defaults.get("min_p"))
    typical_p = fields.number("typical_p", 0, 1)
    if (mirostat := _mirostat(fields)) is not None:  # mirostat excludes these, as in llama.cpp
        top_k = top_p = min_p = typical_p = None
    penalty, penalty_window = _repetition_penalty(fields, defaults)
    try:
        sampler = sym.Sampler(
            temperature=1.0 if temperature is None else temperature,
            top_p=None if top_p is None else max(top_p, _LEAST_PART),
            top_k=top_k if top_k is not None and top_k > 0 else None,  # 0 and -1 mean none in other servers
            min_p=min_p or None,
            typical_p=None if typical_p is None else max(typical_p, _LEAST_PART),
            mirostat=mirostat,
            dry=_dry(fields),
            repetition_penalty=penalty,
            penalty_window=penalty_window,
            presence_penalty=fields.number("presence_penalty", -100, 100, 0.0) or 0.0,
            frequency_penalty=fields.number("frequency_penalty", -100, 100, 0.0) or 0.0,
            logit_bias=_bias(fields),
        )
    except sym.Invalid as error:
        raise ApiError(400, str(error)) from None
    return Sampling(
        sampler=sampler,
        stop=_stops(fields),
        stop_at_end=not fields.flag("ignore_eos"),
        keeps_stop=fields.flag("include_stop_str_in_output"),
        shows_special=not fields.flag("skip_special_tokens"),
        max_tokens=_max_tokens(fields, max_tokens_names),
        n=fields.whole("n", 1, MAX_N, 1) or 1,
        seed=_seed(fields),
    )


def _repetition_penalty(fields: Fields, defaults: Mapping[str, Any]) -> tuple[float, int | None]:
    """Return the penalty, by vLLM's name or llama.cpp's, and the number of latest tokens that it covers (None: all)."""
    if fields.has("repetition_penalty") and fields.has("repeat_penalty"):
        raise ApiError(400, "repetition_penalty and repeat_penalty are one thing: give one", param="repeat_penalty")
    penalty = fields.number("repetition_penalty", 1e-6, 1e6, defaults.get("repetition_penalty"))
    penalty = fields.number("repeat_penalty", 1e-6, 1e6, penalty)
    window = fields.whole("repeat_last_n", -1, _MAX_WHOLE, _NUM_PENALIZED if fields.has("repeat_penalty") else -1)
    return penalty or 1.0, None if window == -1 else window


def _mirostat(fields: Fields) -> sym.Mirostat | None:
    version = fields.whole("mirostat", 0, 2)
    tau, eta = (fields.number(f"mirostat_{name}", 0, 1e6) for name in ("tau", "eta"))
    if not version:
        return None
    return sym.Mirostat(version, 5.0 if tau is None else tau, 0.1 if eta is None else eta)


def _dry(fields: Fields) -> sym.Dry:
    """Return the DRY settings from llama.cpp's fields. The multiplier 0 turns DRY off; the window -1 is all tokens."""
    texts = fields.list("dry_sequence_breakers")
    if texts is not None and (len(texts) > MAX_BREAKERS or not all(map(_is_breaker, texts))):
        most = f"{MAX_BREAKERS} texts, of 1 to {MAX_BREAKER_BYTES} bytes"
        raise fields.wrong("dry_sequence_breakers", f"a list of at most {most}")
    window = fields.whole("dry_penalty_last_n", -1, _MAX_WHOLE, -1)
    return sym.Dry(
        multiplier=fields.number("dry_multiplier", 0, 1e6) or 0.0,
        base=fields.number("dry_base", 1, 1e6) or _DRY.base,
        allowed_length=fields.whole("dry_allowed_length", 0, _MAX_WHOLE, _DRY.allowed_length) or 0,
        window=None if window == -1 else window,
        breakers=_DRY.breakers if texts is None else texts,
    )


def _is_breaker(text: object) -> bool:
    is_text = isinstance(text, str) and 0 < len(text) <= MAX_BREAKER_BYTES and "\0" not in text
    return is_text and len(str(text).encode(errors="replace")) <= MAX_BREAKER_BYTES


def chat_logprobs(fields: Fields) -> int | None:
    """Return the number in `top_logprobs`, or None if `logprobs` is not true."""
    top = fields.whole("top_logprobs", 0, MAX_TOP)
    if not fields.flag("logprobs"):
        if top:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return top or 0


def text_logprobs(fields: Fields) -> int | None:
    """Return the number in `logprobs`, as in /v1/completions."""
    return fields.whole("logprobs", 0, MAX_TOP)


def prompt_top(fields: Fields) -> int | None:
    """Return `prompt_logprobs`: the number of likeliest tokens beside each prompt token. ApiError: a stream."""
    top = fields.whole("prompt_logprobs", 0, MAX_TOP)
    if top is not None and fields.flag("stream"):
        raise ApiError(400, "prompt_logprobs: a stream has none", param="prompt_logprobs")
    return top


def _max_tokens(fields: Fields, names: tuple[str, ...]) -> int | None:
    """Return the maximum number of tokens of an answer, by any of the names; None: as many as fit."""
    found = {
        name: None if name == "n_predict" and fields.body[name] in (-1, -2) else fields.whole(name, 1, _MAX_WHOLE)
        for name in names
        if fields.has(name)
    }
    if len(set(found.values())) > 1:
        raise ApiError(400, f"{' and '.join(found)} are one thing: give one", param=[*found][-1])
    return next(iter(found.values()), None)


def _bias(fields: Fields) -> dict[int, float]:
    """Return `logit_bias` by token id. The ids are texts in JSON."""
    given = fields.child("logit_bias")
    found: dict[int, float] = {}
    if given is not None and len(given.body) > MAX_BIASES:
        raise ApiError(400, f"logit_bias has {len(given.body)} tokens: {MAX_BIASES} is the most", param="logit_bias")
    for name in given.body if given is not None else ():
        assert given is not None
        bias = given.number(name, -100, 100, 0.0)
        if not name.isdecimal() or len(name) > 10:
            raise ApiError(400, f"logit_bias: {name[:40]!r} is no token number", param="logit_bias")
        found[int(name)] = float("-inf") if bias == _NEVER else bias or 0.0
    return found


def _stops(fields: Fields) -> tuple[str, ...]:
    if not fields.has("stop"):
        return ()
    given = fields.body["stop"]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or len(texts) > MAX_STOPS:
        raise fields.wrong("stop", f"a text, or a list of at most {MAX_STOPS} texts")
    return tuple(text for text in texts if text)


def _seed(fields: Fields) -> int | None:
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1)
    return None if seed is None else seed % (1 << 64)
