"""GENERATE: check its arguments once, and begin the generation.

The run sends each token at once. While the ring is full, because the program does not read, the run keeps the tokens
and sends them together. So for a program that does not read, the daemon keeps four bytes for each token, and its
log-probabilities if the program wants them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import trio

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.abi import Op
from libsym.arguments import utf8
from libsym.calls.generate import MAX_LOGPROBS, MAX_STOP_TEXT_CHARS, MAX_STOP_TEXTS
from libsym.channel.server import Request
from libsym.errors import Invalid
from libsym.rows.reduced import RowReducer, reduction_block
from libsym.rows.sampler import RowSampler, sampling_block_bytes
from libsym.rows.stops import StopTexts
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.generation import Draft, GenerateCall
from scheduler.batch.grammar import Grammars, GrammarState, Owner
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import appendable
from scheduler.operations.models import Models
from scheduler.operations.operation import Operation, Table
from scheduler.operations.text import TextModel
from scheduler.wire.payloads import PayloadReader, check_priority, deadline_of, json_of

MAX_OPTION_TEXTS = MAX_STOP_TEXTS + 16
"""Maximum number of texts in the options. The names of options count as texts, too."""
MAX_OPTION_OTHER_BYTES = 32 << 10
"""Maximum number of bytes of the options' JSON outside their texts: enough for some thousands of stop tokens."""
DRAFT_HISTORY = 1024
"""Entries at the file's end that a draft searches, besides given and generated tokens. Reading them takes 0.5 ms."""


class Generating:
    """Answers GENERATE."""

    def __init__(self, batches: BatchScheduler, models: Models) -> None:
        self._batches = batches
        self._models = models
        self._grammars = [Grammars(each.text) for each in models]
        self._compilers = trio.CapacityLimiter(2)  # workers that compile grammars of all programs

    async def compiled(self) -> None:
        """Wait until no worker compiles a grammar. A worker in native code cannot be interrupted."""
        while any(each.num_compiling for each in self._grammars):  # noqa: ASYNC110 - abandoned threads send no event
            await trio.sleep(0.02)

    def table(self) -> Table:
        return {Op.GENERATE: Operation(self._generate, max_waiting=MAX_LATER)}

    def _generate(self, call: SystemCall) -> Coroutine[Any, Any, None] | None:
        """Begin the generation. If its grammar is not compiled yet, return a coroutine that compiles it first."""
        generation, described = self._parse(call)
        call.tie(call.request.handle)
        grammars = self._grammars[self._models.of(generation.file).number]
        if described is not None and (grammar := grammars.kept(_owner(call.lip), *described)) is None:
            return self._compile_first(call, generation, partial(grammars.compile, _owner(call.lip), *described))
        if described is not None:
            generation.grammar = grammar
        self._begin(call, generation)
        return None

    async def _compile_first(
        self, call: SystemCall, generation: GenerateCall, compiled: Callable[[], GrammarState]
    ) -> None:
        left_s = math.inf if generation.deadline_s is None else max(0.0, generation.deadline_s - time.monotonic())
        with trio.move_on_after(left_s):
            generation.grammar = await trio.to_thread.run_sync(
                compiled, limiter=self._compilers, abandon_on_cancel=True
            )
            await trio.lowlevel.checkpoint_if_cancelled()  # the deadline may have passed just now
        if generation.grammar is None:
            generation.end_late()
        else:
            self._begin(call, generation)

    def _begin(self, call: SystemCall, generation: GenerateCall) -> None:
        call.when_cancelled(partial(self._batches.cancel, generation))
        self._batches.submit(generation)

    def _parse(self, call: SystemCall) -> tuple[GenerateCall, tuple[str, str] | None]:
        """Return the call for the batch scheduler, and the grammar's kind and source, if the request has a grammar."""
        file = appendable(call.lip, call.request.handle)
        num_tokens, num_positions, max_tokens, priority = call.request.args
        fields = PayloadReader(call.request.payload)
        model = self._models.of(file)
        tokens, positions = model.limited.entries(fields, num_tokens, num_positions)
        if max_tokens < 0:
            raise Invalid(f"max_tokens={max_tokens}: 1 or more, or 0 for as many as the context holds")
        vocab_size, token_texts = model.limited.vocab_size, model.limited.token_texts
        block = fields.take(sampling_block_bytes(fields.left, vocab_size), "the sampler")
        sampler = RowSampler(block, vocab_size, token_texts)
        options = _options(call.request, fields.rest())
        scores = None
        if "logprobs" in options:
            scores = RowReducer(reduction_block(top_k=options["logprobs"] or None), vocab_size)
        generation = GenerateCall(
            call.lip,
            file,
            tokens,
            positions,
            call,
            max_tokens=max_tokens,
            sampler=sampler,
            stop_tokens=frozenset(_stop_tokens(model.text, options)),
            stops=StopTexts(options["stop"], token_texts) if options.get("stop") else None,
            draft=_draft(file, tokens, *options["draft"]) if "draft" in options else None,
            scores=scores,
            priority=check_priority(priority),
            deadline_s=deadline_of(options.get("deadline_us", 0)),
            turn_at=options.get("turn_at"),
        )
        return generation, options.get("grammar")


def _stop_tokens(text: TextModel, options: dict[str, Any]) -> set[int]:
    found = set(options.get("stop_tokens", ()))
    wrong = [token for token in found if not 0 <= token < text.vocab_size]
    if wrong:
        raise Invalid(f"stop token {wrong[0]} is out of range: the vocabulary has 0 to {text.vocab_size - 1}")
    # With a grammar, end tokens always end the generation.
    if options.get("stop_at_end", True) or options.get("grammar"):
        found |= text.eos_ids
    return found


def _draft(file: OpenKv, tokens: IntArray, max_tokens: int, min_match: int) -> Draft:
    before, _ = file.table.read(max(0, file.table.length - DRAFT_HISTORY), file.table.length)
    return Draft(max_tokens, min_match, np.concatenate((before, tokens[-DRAFT_HISTORY:])).astype(np.int32))


def _options(request: Request, source: bytes) -> dict[str, Any]:
    """Return the options at the end of a GENERATE, from their JSON. Invalid: a name or a value is wrong."""
    options = {}
    if source:
        options = json_of(request, source, max_texts=MAX_OPTION_TEXTS, max_other_bytes=MAX_OPTION_OTHER_BYTES)
    if not isinstance(options, dict):
        raise Invalid("the options of generate() are no JSON object")
    checked: dict[str, Any] = {}
    for name, value in options.items():
        check = _CHECKS.get(name)
        if check is None:
            raise Invalid(f"generate() has no option {name[:40]!r}")
        if value is not None:
            checked[name] = check(value)
    return checked


def _stop_token_list(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise Invalid("stop tokens are a list of whole numbers")
    return value


def _stop_text_list(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise Invalid("stop texts are a list of texts")
    if len(value) > MAX_STOP_TEXTS or any(len(text) > MAX_STOP_TEXT_CHARS for text in value):
        raise Invalid(f"at most {MAX_STOP_TEXTS} stop texts are possible, of at most {MAX_STOP_TEXT_CHARS} characters")
    return value


def _owner(lip: Lip) -> Owner:
    root = lip.credentials.root
    return Owner(lip.uid, 0 if root is None else root.number)


def _grammar_pair(value: Any) -> tuple[str, str]:
    pair = (value.get("kind"), value.get("source")) if isinstance(value, dict) else (None, None)
    if not isinstance(pair[0], str) or not isinstance(pair[1], str):
        raise Invalid("a grammar has a kind and a source, which are texts")
    utf8(pair[1], "a grammar")  # the compiler takes UTF-8 only
    return pair[0], pair[1]


def _draft_pair(value: Any) -> tuple[int, int]:
    pair = (value.get("max_tokens"), value.get("min_match")) if isinstance(value, dict) else (None, None)
    if type(pair[0]) is not int or type(pair[1]) is not int:
        raise Invalid("a draft has max_tokens and min_match, which are whole numbers")
    return pair[0], pair[1]


def _stop_at_end(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Invalid("stop_at_end is true or false")
    return value


def _logprobs(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_LOGPROBS:
        raise Invalid(f"logprobs is a whole number from 0 to {MAX_LOGPROBS}")
    return value


def _deadline_us(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 63:
        raise Invalid("a deadline is a whole number of microseconds, more than 0")
    return value


def _turn_at(value: Any) -> int:
    if type(value) is not int or value < -1:
        raise Invalid("a turn begins behind a whole number of the tokens, or is -1: the last one goes on")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "stop_tokens": _stop_token_list,
    "stop": _stop_text_list,
    "grammar": _grammar_pair,
    "draft": _draft_pair,
    "stop_at_end": _stop_at_end,
    "deadline_us": _deadline_us,
    "logprobs": _logprobs,
    "turn_at": _turn_at,
}
