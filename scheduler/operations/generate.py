"""GENERATE: what it asks for, checked once; its tokens on their way to the program; and VOCABULARY.

Tokens are sent as they come. While replies wait for room in the ring (the program does not read) they are kept here and
sent together, so a reader that stops costs four bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import trio

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.abi import Finish
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import Invalid, SymError
from libsym.generate import MAX_STOP_TEXT_CHARS, MAX_STOP_TEXTS
from libsym.rows.sampler import RowSampler, sampling_block_bytes
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import HotGeneration
from scheduler.batch.drafts import NgramDraft
from scheduler.batch.generation import GenerateCall
from scheduler.batch.grammar import Grammar, Grammars, GrammarText
from scheduler.batch.stops import StopTexts
from scheduler.connection.lip import Lip
from scheduler.connection.under_way import cost_of
from scheduler.operations.pred import Limited, appendable
from scheduler.payloads import Fields, check_priority, json_of
from scheduler.replies import Reply

MAX_OPTION_TEXTS = MAX_STOP_TEXTS + 16
"""Names of options, too."""
MAX_OPTION_OTHER_BYTES = 32 << 10
"""Some thousands of stop tokens."""
DRAFT_HISTORY = 1024
"""The last entries of the file that a draft looks through, besides what is given and generated: 0.5 ms to take in."""
_PAYLOAD_TOKENS = PAYLOAD_BYTES // 4


@dataclass(frozen=True, slots=True)
class Asked:
    """One GENERATE, checked."""

    file: OpenKv
    tokens: IntArray
    positions: IntArray | None
    max_tokens: int
    priority: int
    sampler: RowSampler
    stop_tokens: frozenset[int]
    stop_texts: tuple[str, ...]
    grammar: tuple[str, str] | None
    draft: tuple[int, int] | None


class Generating:
    """Answers GENERATE."""

    def __init__(self, batches: BatchScheduler, text: GrammarText, limited: Limited) -> None:
        self._batches = batches
        self._text = text
        self._limited = limited
        self._grammars = Grammars(text)
        self._compilers = trio.CapacityLimiter(2)  # workers that a program's grammars may keep busy

    def generate(self, lip: Lip, request: Request) -> Coroutine[Any, Any, None] | None:
        """Begin at once, unless a grammar has to be compiled first: then the coroutine does, and sees it through."""
        asked = self._parse(lip, request)
        lip.generation_began(request.handle, request.id)
        ended = partial(lip.under_way.end, cost_of(request))
        if asked.grammar is None:
            self._begin(lip, request, asked, None, ended)
            return None
        if (grammar := self._grammars.kept(*asked.grammar)) is not None:
            self._begin(lip, request, asked, grammar, ended)
            return None
        return self._compile_first(lip, request, asked, asked.grammar)

    async def _compile_first(self, lip: Lip, request: Request, asked: Asked, described: tuple[str, str]) -> None:
        try:
            grammar = await trio.to_thread.run_sync(
                self._grammars.compile, *described, limiter=self._compilers, abandon_on_cancel=True
            )
            await trio.lowlevel.checkpoint_if_cancelled()  # in the moment when it was compiled
        except BaseException:
            lip.generation_ended(request.handle, request.id)
            raise
        over = trio.Event()
        generation = self._begin(lip, request, asked, grammar, over.set)
        lip.cancellable[request.id] = generation.cancel  # not this task, which only waits
        await over.wait()

    def _begin(
        self,
        lip: Lip,
        request: Request,
        asked: Asked,
        grammar: Grammar | None,
        ended: Callable[[], None],
    ) -> Generation:
        stops = StopTexts(asked.stop_texts, self._text.token_texts) if asked.stop_texts else None
        generation = Generation(self._batches, lip, request, asked, stops, ended)
        lip.cancellable[request.id] = generation.cancel
        generation.begin(grammar, self._draft(asked))
        return generation

    @staticmethod
    def _draft(asked: Asked) -> NgramDraft | None:
        if asked.draft is None:
            return None
        max_tokens, min_match = asked.draft
        table = asked.file.table
        before, _ = table.read(max(0, table.length - DRAFT_HISTORY), table.length)
        history = np.concatenate((before, asked.tokens[-DRAFT_HISTORY:]))
        return NgramDraft(history.tolist(), max_tokens=max_tokens, min_match=min_match)

    def _parse(self, lip: Lip, request: Request) -> Asked:
        file = appendable(lip, request.handle)
        num_tokens, num_positions, max_tokens, priority = request.args
        fields = Fields(request.payload)
        tokens, positions = self._limited.entries(fields, num_tokens, num_positions)
        if max_tokens < 0:
            raise Invalid(f"max_tokens={max_tokens}: 1 or more, or 0 for as many as the context holds")
        vocab_size = self._limited.vocab_size
        sampler = RowSampler(fields.take(sampling_block_bytes(fields.left, vocab_size), "the sampler"), vocab_size)
        options = _options(request, fields.rest())
        draft = options.get("draft")
        if draft is not None:
            NgramDraft((), max_tokens=draft[0], min_match=draft[1])  # its limits are checked there
        stop_tokens = frozenset(self._stop_tokens(options))
        stop_texts = tuple(options.get("stop", ()))
        if stop_texts:
            StopTexts(stop_texts, ())  # what is no text is refused there
        return Asked(
            file=file,
            tokens=tokens,
            positions=positions,
            max_tokens=max_tokens,
            priority=check_priority(priority),
            sampler=sampler,
            stop_tokens=stop_tokens,
            stop_texts=stop_texts,
            grammar=options.get("grammar"),
            draft=draft,
        )

    def _stop_tokens(self, options: dict[str, Any]) -> set[int]:
        found = set(options.get("stop_tokens", ()))
        wrong = [token for token in found if not 0 <= token < self._limited.vocab_size]
        if wrong:
            raise Invalid(
                f"stop token {wrong[0]} is out of range: the vocabulary has 0 to {self._limited.vocab_size - 1}"
            )
        # Where a grammar may end, an end token is how it does.
        if options.get("stop_at_end", True) or options.get("grammar"):
            found |= self._text.eos_ids
        return found


class Generation:
    """One GENERATE on its way: what was drawn and is not sent."""

    def __init__(
        self,
        batches: BatchScheduler,
        lip: Lip,
        request: Request,
        asked: Asked,
        stops: StopTexts | None,
        ended: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._lip = lip
        self._id = request.id
        self._handle = request.handle
        self._asked = asked
        self._stops = stops
        self._ended = ended
        self._kept: list[int] = []
        self._call: GenerateCall | None = None
        self._stop_token = -1
        self._has_appended = False

    def begin(self, grammar: Grammar | None, draft: NgramDraft | None) -> None:
        asked = self._asked
        self._call = _Call(
            self._lip,
            asked.file,
            asked.tokens,
            asked.positions,
            max_tokens=asked.max_tokens,
            sampler=asked.sampler,
            stop_tokens=asked.stop_tokens,
            stops=self._stops,
            grammar=grammar,
            draft=draft,
            emit=self._emit,
            finished=self._finished,
            priority=asked.priority,
            channel=self._lip.channel,
            request_id=self._id,
        )
        self._call.generation = self
        self._batches.submit(self._call)

    def cancel(self) -> None:
        if self._call is not None:
            self._batches.cancel(self._call)

    def let_go(self) -> None:
        """Its call is over. The two refer to each other: what the program sent would stay until the collector comes."""
        if self._call is not None:
            self._stop_token, self._has_appended = self._call.stop_token, self._call.num_appended > 0
        self._call = None

    @property
    def has_kept(self) -> bool:
        """Some tokens wait here: what is sent past them would come too early."""
        return bool(self._kept)

    def _emit(self, tokens: list[int], num_entries: int) -> None:
        """The first tokens are never kept: from them a program knows how long the file was before (see libsym)."""
        self._kept += tokens
        if not self._lip.channel.num_waiting_replies or not self._has_sent:
            self._send(num_entries)

    _has_sent = False

    def _send(self, num_entries: int, num_left: int = 0) -> None:
        """Send what is kept, but for so many tokens, as replies that others follow."""
        while len(self._kept) > num_left:
            now = self._kept[:_PAYLOAD_TOKENS]
            self._kept = self._kept[_PAYLOAD_TOKENS:]
            self._lip.channel.reply(self._id, (len(now), num_entries), _int32(now), more=True)
            self._has_sent = True

    def _finished(self, error: SymError | None, finish: Finish) -> None:
        lip, num_entries = self._lip, self._asked.file.table.length
        lip.cancellable.pop(self._id, None)
        lip.generation_ended(self._handle, self._id)
        if error is not None:
            self._send(num_entries)
            if self._has_appended:  # so that the program knows what is pending
                lip.channel.reply(self._id, (0, num_entries), more=True)
            lip.channel.reply(self._id, error=error)
        else:
            self._send(num_entries, _PAYLOAD_TOKENS)
            args = (len(self._kept), num_entries, int(finish), self._stopped_by(finish))
            lip.channel.reply(self._id, args, _int32(self._kept))
        self._ended()

    def _stopped_by(self, finish: Finish) -> int:
        """The number of the stop text, or the stop token."""
        if finish is Finish.STOP_TEXT and self._stops is not None and self._stops.found is not None:
            return self._stops.found
        return self._stop_token if finish is Finish.STOP_TOKEN else -1


class _Call(GenerateCall):
    """Goes on in the loop of steps only while nothing is kept that has to be sent before."""

    generation: Generation | None = None

    @property
    def hot(self) -> HotGeneration | None:
        if self.generation is not None and self.generation.has_kept:
            return None
        return super().hot

    def let_go(self) -> None:
        super().let_go()
        assert self.generation is not None
        self.generation.let_go()


class Vocabulary:
    """Answers VOCABULARY: the bytes of the tokens, as many as a message holds."""

    def __init__(self, text: GrammarText) -> None:
        self._text = text

    async def window(self, _lip: Lip, request: Request) -> Reply:
        return await trio.to_thread.run_sync(self._window, request.args[0])

    def _window(self, first: int) -> Reply:
        texts = self._text.token_texts
        if not 0 <= first < len(texts):
            raise Invalid(f"token {first} is out of range: the vocabulary has 0 to {len(texts) - 1}")
        lengths = np.fromiter(map(len, texts[first:]), np.uint32)
        count = int(np.searchsorted(np.cumsum(lengths + 4, dtype=np.int64), PAYLOAD_BYTES, "right"))
        payload = lengths[:count].tobytes() + b"".join(texts[first : first + count])
        return Reply((count, len(texts)), payload)


def _options(request: Request, source: bytes) -> dict[str, Any]:
    """The JSON at the end of a GENERATE, with every value of the type that it has to be."""
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


def _grammar_pair(value: Any) -> tuple[str, str]:
    pair = (value.get("kind"), value.get("source")) if isinstance(value, dict) else (None, None)
    if not isinstance(pair[0], str) or not isinstance(pair[1], str):
        raise Invalid("a grammar has a kind and a source, which are texts")
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


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "stop_tokens": _stop_token_list,
    "stop": _stop_text_list,
    "grammar": _grammar_pair,
    "draft": _draft_pair,
    "stop_at_end": _stop_at_end,
}


def _int32(tokens: list[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
