"""Constraints on an answer, under all names that servers use. Each constraint becomes a grammar.

Forbidden words, a set of allowed tokens, and a minimum number of tokens become grammars, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields
from lips.gateway.sampling import Sampling

MAX_CHOICES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED = 4096
MAX_STOP_TOKENS = 1024
MAX_LEAST_TOKENS = 4096
_NEVER = float("-inf")
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]?start\s*:(?!:))")
Named = tuple[str, sym.Grammar]
"""The name of the field that asks for a grammar, and the grammar."""


def bounded(fields: Fields, sampling: Sampling, model: sym.ModelInfo, own: Named | None) -> Sampling:
    """Return the sampling settings with the request's constraints.

    `own` is a grammar from the request's tools, or from a field that only the request's interface has.
    """
    sampling = replace(sampling, stop_tokens=tuple(_tokens(fields, "stop_token_ids", model, MAX_STOP_TOKENS)))
    if beyond := [token for token in sampling.sampler.logit_bias if token >= model.vocab_size]:
        what = f"logit_bias: {beyond[0]} is no token from 0 to {model.vocab_size - 1}"
        raise ApiError(400, what, param="logit_bias")
    formats = [*(() if own is None else (own,)), *_formats(fields)]
    limits = [*_bad_words(fields), *_token_limits(fields, sampling, model)]
    named = [*formats, *limits]
    if len(named) > 1:
        names = " and ".join(name for name, _ in named)
        raise ApiError(400, f"{names} constrain the answer in different ways: give one", param=named[1][0])
    if not named:
        return sampling
    if named[0][0] == "min_tokens" and sampling.max_tokens == _least(fields):
        return _never(sampling, model.eos_ids.union(sampling.stop_tokens))  # far cheaper than the grammar
    if limits and not sampling.stop_at_end:
        sampling = _never(sampling, model.eos_ids)  # the grammar itself would allow an end token
    allowed = _tokens(fields, "allowed_token_ids", model, MAX_ALLOWED)
    if allowed:
        sampling = _never(sampling, model.eos_ids - set(allowed))
    return replace(sampling, grammar=named[0][1], is_format=bool(formats))


def response_format(fields: Fields) -> Named | None:
    """Return the grammar that `response_format` asks for."""
    wanted = fields.child("response_format")
    if wanted is None:
        return None
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", _json({"type": "object"})
    described = wanted.child("json_schema")
    schema = None if described is None else described.child("schema")
    if schema is None:
        raise ApiError(400, "response_format.json_schema.schema is missing", param="response_format")
    return "response_format", _json(schema.body)


def output_format(fields: Fields) -> Named | None:
    """Return the grammar that Anthropic's `output_config.format` asks for."""
    config = fields.child("output_config")
    wanted = None if config is None else config.child("format")
    if wanted is None:
        return None
    wanted.one_of("type", ("json_schema",), "json_schema")
    wanted.required("schema")
    schema = wanted.child("schema")
    assert schema is not None
    return "output_config.format", _json(schema.body)


def _formats(fields: Fields) -> Iterator[Named]:
    """Yield the grammars of the fields that vLLM and llama.cpp have."""
    structured = fields.child("structured_outputs") or Fields({})
    for place, name in ((fields, "guided_json"), (fields, "json_schema"), (structured, "json")):
        if place.has(name):
            yield place.name_of(name), _json(_schema(place, name))
    if structured.flag("json_object"):
        yield structured.name_of("json_object"), _json({"type": "object"})
    for place, name in ((fields, "guided_choice"), (structured, "choice")):
        if choices := texts(place, name, MAX_CHOICES):
            yield place.name_of(name), sym.Grammar.lark(f"start: {' | '.join(map(_literal, choices))}")
    for place, name in ((fields, "guided_regex"), (structured, "regex")):
        if pattern := place.text(name):
            yield place.name_of(name), sym.Grammar.regex(pattern)
    for place, name in ((fields, "guided_grammar"), (fields, "grammar"), (structured, "grammar")):
        if source := place.text(name):
            make = sym.Grammar.lark if _LARK.search(source) else sym.Grammar.gbnf
            yield place.name_of(name), make(source)


def _json(schema: Any) -> sym.Grammar:
    return sym.Grammar.json(schema, compact=True)


def _schema(fields: Fields, name: str) -> Any:
    """Return a field's schema, as an object or as JSON text."""
    value = fields.body[name]
    if not isinstance(value, (str, dict, bool)):
        raise fields.wrong(name, "a JSON schema")
    return value


def texts(fields: Fields, name: str, most: int, most_chars: int = 1 << 16) -> list[str]:
    """Return a field's list of texts, each of 1 to `most_chars` characters."""
    found = fields.list(name) or []
    if len(found) > most or not all(isinstance(each, str) and 0 < len(each) <= most_chars for each in found):
        raise fields.wrong(name, f"a list of at most {most} texts of 1 to {most_chars} characters")
    return found


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _bad_words(fields: Fields) -> Iterator[Named]:
    """Yield a grammar of all texts without the words in `bad_words`."""
    if words := texts(fields, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS):
        spelled = "|".join("".join(f"\\x{{{ord(char):x}}}" for char in word) for word in words)
        yield "bad_words", sym.Grammar.lark(f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({spelled})(?s:.*)/\n")


def _tokens(fields: Fields, name: str, model: sym.ModelInfo, most: int) -> list[int]:
    found = fields.list(name) or []
    if len(found) > most or not all(type(each) is int and 0 <= each < model.vocab_size for each in found):
        raise fields.wrong(name, f"a list of at most {most} tokens from 0 to {model.vocab_size - 1}")
    return found


def _token_limits(fields: Fields, sampling: Sampling, model: sym.ModelInfo) -> Iterator[Named]:
    """Yield the grammar of the allowed tokens, or of a minimum number of tokens before an end token."""
    least = _least(fields)
    if least and sampling.stop:
        raise ApiError(400, "min_tokens: a stop text may end the answer before", param="min_tokens")
    if sampling.max_tokens is not None and least > sampling.max_tokens:
        raise ApiError(400, f"min_tokens is {least}: max_tokens is {sampling.max_tokens}", param="min_tokens")
    listed = _tokens(fields, "allowed_token_ids", model, MAX_ALLOWED)
    if not least and not listed:
        return
    inner, first = (_ranges(listed, out, model) for out in (model.eos_ids, model.eos_ids.union(sampling.stop_tokens)))
    if not first:
        raise fields.wrong("allowed_token_ids", "a token that does not end the answer")
    name = "allowed_token_ids" if listed else "min_tokens"
    begin = f"first{{{least}}} " if least else ""
    yield name, sym.Grammar.lark(f"start: {begin}inner*\nfirst: <[{first}]>\ninner: <[{inner}]>\n")


def _least(fields: Fields) -> int:
    return fields.whole("min_tokens", 0, MAX_LEAST_TOKENS, 0) or 0


def _ranges(listed: Iterable[int], out: AbstractSet[int], model: sym.ModelInfo) -> str:
    """Return the listed tokens, or all tokens if none are listed, without those of `out`, in llguidance's notation."""
    if listed:
        return ",".join(f"{token}-{token}" for token in sorted(set(listed) - out))
    ends = [-1, *sorted(out), model.vocab_size]
    return ",".join(f"{last + 1}-{after - 1}" for last, after in pairwise(ends) if last + 1 < after)


def _never(sampling: Sampling, tokens: Iterable[int]) -> Sampling:
    biases = {**sampling.sampler.logit_bias, **dict.fromkeys(tokens, _NEVER)}
    return replace(sampling, sampler=replace(sampling.sampler, logit_bias=biases))
