"""generate: a loop of pred and draw that the daemon runs as one call. Each token arrives when it is drawn."""

from __future__ import annotations

import codecs
import errno
import json
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

from libsym.abi import Finish, Op
from libsym.arguments import int32, int64, seed64, shown, utf8
from libsym.calls.faces import script_of
from libsym.calls.open_file import OpenFile, channel_of
from libsym.calls.pred import Positions, checked_priority, checked_sampler, microseconds, places_of
from libsym.calls.schema import closed
from libsym.calls.status import model_info
from libsym.calls.text import tokenize
from libsym.channel.client import ClientChannel
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid, SymError
from libsym.rows.reduced import ReducedDist, drawn_dists
from libsym.rows.sampler import Sampler, random_seed

MAX_STOP_TEXTS = 64
MAX_STOP_TEXT_CHARS = 1024
MAX_LOGPROBS = 256
MAX_DRAFT_TOKENS = 64
MAX_MATCH = 16
"""Largest `min_match` of an Ngram: longer matches predict no better."""
_MAX_CHAR_BYTES = 4
GOES_ON = -1

Ending = Literal["length", "stop_token", "stop_text", "grammar", "cancelled", "deadline"]
_ENDINGS: dict[int, Ending] = {
    Finish.LENGTH: "length",
    Finish.STOP_TOKEN: "stop_token",
    Finish.STOP_TEXT: "stop_text",
    Finish.GRAMMAR: "grammar",
    Finish.CANCELLED: "cancelled",
    Finish.DEADLINE: "deadline",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A limit on the text of a generation: a JSON schema, a regex, or a Lark or GBNF grammar.

    >>> grammar = sym.Grammar.regex("(yes|no)")
    >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text()) in ("yes", "no")
    True
    """

    kind: Literal["json", "compact_json", "regex", "lark", "gbnf"]
    source: str

    @classmethod
    def json(cls, schema: str | Mapping[str, Any] | bool | type = True, *, compact: bool = False) -> Self:
        """Return a grammar of the JSON that a schema describes. Without a schema, any JSON is allowed.

        `schema`: text, a mapping, or a pydantic class. An object has only the properties in `properties`, unless it
        names none or says `"additionalProperties": true`. Properties that are not in `required` are optional. White
        space is allowed between values, so a model may write spaces until its tokens are used up. `compact` forbids
        white space.

        >>> grammar = sym.Grammar.json({"enum": ["red", "blue"]})
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text()) in ('"red"', '"blue"')
        True
        >>> grammar = sym.Grammar.json({"const": {"a": [1, 2]}}, compact=True)
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text())
        '{"a":[1,2]}'
        """
        if not isinstance(compact, bool):
            raise Invalid(f"compact={shown(compact)}: must be True or False")
        kind: Literal["json", "compact_json"] = "compact_json" if compact else "json"
        of_class = getattr(schema, "model_json_schema", None)
        try:
            said = json.loads(schema) if isinstance(schema, str) else schema if of_class is None else of_class()
            return cls(kind, json.dumps(closed(said)))
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid(f"the schema {shown(schema)} is no JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return a grammar of the texts that a regex matches as a whole.

        The syntax is the same as in Rust's regex: no look-around and no back-references.

        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=sym.Grammar.regex("a{3}")).text())
        'aaa'
        """
        return cls("regex", _grammar_text(pattern, "a regular expression"))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a grammar in Lark's notation. The rule `start` gives the whole text.

        >>> grammar = sym.Grammar.lark('start: "yes" "!"')
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text())
        'yes!'
        """
        return cls("lark", _grammar_text(grammar, "a Lark grammar"))

    @classmethod
    def gbnf(cls, grammar: str) -> Self:
        """Return a grammar in llama.cpp's notation. The rule `root` gives the whole text.

        >>> grammar = sym.Grammar.gbnf('root ::= "yes" "!"')
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text())
        'yes!'
        """
        return cls("gbnf", _grammar_text(grammar, "a GBNF grammar"))


def _grammar_text(source: object, what: str) -> str:
    if not isinstance(source, str):
        raise Invalid(f"{what} must be text, not {shown(source)}")
    return source


@dataclass(frozen=True, slots=True)
class Ngram:
    """Drafts by lookup. If the last `min_match` tokens occurred before, the draft has the tokens that followed them.

    A draft has at most `max_tokens` tokens.

    >>> drafted = sym.generate(sym.kv_create(), [65], max_tokens=40, draft=sym.Ngram(max_tokens=4))
    >>> list(drafted) == list(sym.generate(sym.kv_create(), [65], max_tokens=40))
    True
    """

    max_tokens: int = 8
    min_match: int = 2

    def __post_init__(self) -> None:
        for name, most in (("max_tokens", MAX_DRAFT_TOKENS), ("min_match", MAX_MATCH)):
            number = getattr(self, name)
            if not isinstance(number, (int, Integral)) or not 1 <= int(number) <= most:
                raise Invalid(f"Ngram({name}={shown(number)}): must be a whole number from 1 to {most}")


class AskOptions(TypedDict, total=False):
    """Options of `generate` and `Chat.ask`, for functions that pass them on."""

    sampler: Sampler | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    stop: str | int | Iterable[str | int]
    stop_at_end: bool
    keep_stop: bool
    max_tokens: int | None
    grammar: Grammar | None
    draft: Literal["ngram"] | Ngram | None
    logprobs: int | None
    seed: int | None
    before: Iterable[int] | None
    priority: int | None
    deadline: float | None


class Options(AskOptions, total=False):
    """Options of `generate`, including those that `Chat.ask` chooses itself."""

    first_draw: int
    turn_at: int
    """Index of the token at which a turn begins. The daemon notes the turn with the file. GOES_ON: no new turn begins.
    """


def generate(
    kv: OpenFile,
    tokens: Iterable[int],
    *,
    positions: Positions = None,
    sampler: Sampler | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    keep_stop: bool = True,
    max_tokens: int | None = None,
    grammar: Grammar | None = None,
    draft: Literal["ngram"] | Ngram | None = None,
    logprobs: int | None = None,
    seed: int | None = None,
    first_draw: int = 0,
    before: Iterable[int] | None = None,
    priority: int | None = None,
    deadline: float | None = None,
) -> Generation:
    """Append `tokens` and let the model continue, token by token, in a loop that the daemon runs.

    >>> kv = sym.kv_create()
    >>> generation = sym.generate(kv, sym.tokenize("Once"), max_tokens=5)
    >>> len(list(generation)), generation.finish
    (5, 'length')
    >>> kv.len() + len(generation.pending)
    9

    With the same seed, the generation's tokens equal those of this loop:

        draws, pending = sampler.start(before=tokens), tokens
        while True:
            token = draws.draw(pred(kv, pending))
            if token in stop: break
            yield token
            pending = [token]

    So the last tokens are not in the file when the generation ends: they are `pending`. Give them first to the next
    call.

    `sampler`: how tokens are drawn. `temperature`, `top_k`, `top_p`, `min_p` and `seed` replace the sampler's own
    settings. Without a sampler, temperature, top_k, top_p and min_p, each token is the likeliest.
    `first_draw`: serial number of the first draw of the seed, to continue where another call has ended.
    `before`: tokens that the repetition penalty and DRY count as already said, in place of `tokens`. If the beginning
    of the file was computed earlier, give the tokens of the whole text.
    `stop`: token ids and texts that end the generation. The tokens end before a stop token, or with the end of a stop
    text. `stop_at_end=False`: the model's end tokens do not stop the generation. `keep_stop=False`: when the program
    has read all tokens, the file is cut before the token in which the stop text begins. Text of that token before the
    stop text becomes `pending`.
    `max_tokens`: limit of tokens; by default as many as the model's context holds.
    `grammar`: the texts that are allowed. Tokens that the grammar forces need no step of their own.
    `draft`: "ngram" looks for an earlier occurrence of the last tokens, and guesses that the same tokens follow. Right
    guesses save steps. Drafts never change the tokens.
    `logprobs`: `dists` has the log-probability of each token. At each place it also has this many likeliest tokens (0:
    none).
    `positions`, `priority`: as in `pred`.
    `deadline`: seconds from now. At that time the generation ends, with the tokens drawn so far.

    The generation begins immediately, and other calls on the file wait for its end. A generation ends early with
    `cancel()`, at the end of a `with` block, or when the object is gone. The generation also ends when the handle `kv`
    closes, removes or truncates the file.
    """
    options = Options(
        sampler=sampler,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
        stop_at_end=stop_at_end,
        keep_stop=keep_stop,
        max_tokens=max_tokens,
        grammar=grammar,
        draft=draft,
        logprobs=logprobs,
        seed=seed,
        first_draw=first_draw,
        before=before,
        priority=priority,
        deadline=deadline,
    )
    return Generation(kv, *generate_call(kv, tokens, options, positions))


_INTERNAL = frozenset({"came", "channel", "drop_stop", "fetch", "read_part", "stop_texts", "take"})


class Progress:
    """Results of a generation so far. The subclasses `Generation` and `sym.aio.AsyncGeneration` receive the replies."""

    def __init__(self, kv: OpenFile, started: Started) -> None:
        self._kv = kv  # keeps an anonymous file open
        self._num_cuts = kv.num_cuts
        self.seed = started.seed
        """Seed of the draws: another call with this seed gives the same tokens."""
        self.finish: Ending | None = None
        """Reason why the generation ended. None: it still runs, or has failed."""
        self.stopped_by: str | int | None = None
        """The stop text or the stop token that ended the generation."""
        self.stop_texts = started.stop_texts
        self._given = started.tokens
        self._logprobs = started.logprobs
        self._tokens: list[int] = []
        self._dists: list[ReducedDist | None] = []
        self._keeps_stop = started.keeps_stop
        self._is_guided = started.is_guided
        self._left: list[int] | None = None  # pending tokens after a cut of the stop text; None: no cut
        self._length_before: int | None = None  # length of the file after the given tokens and before generated ones
        self._num_entries = 0
        self._is_cancelled = False
        self._is_over = False  # the last reply has been read
        self._has_failed = False  # failed by an error other than the cancellation
        self.num_read = self.num_read_bytes = 0
        """Number of tokens, and number of bytes of text, that the program has read."""

    @property
    def kv(self) -> OpenFile:
        """The file that the generation appends to."""
        return self._kv

    @property
    def given(self) -> list[int]:
        """The tokens that the program gave to the generation.

        >>> sym.generate(sym.kv_create(), [65], max_tokens=1).given
        [65]
        """
        return list(self._given)

    @property
    def tokens(self) -> list[int]:
        """Tokens that have arrived so far. Reading this property counts them as read. Invalid: see `cancel`."""
        self._require_settled()
        self.num_read = len(self._tokens)
        return self._tokens

    @property
    def dists(self) -> list[ReducedDist | None]:
        """Distribution of each of `tokens`, if the call asked for `logprobs`. None: a grammar forced that token.

        A distribution has the drawn `token` and the likeliest tokens, `topk(k)`. `logprob(token)` is the model's own
        log-probability, before temperature, penalties and limits.

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=2, logprobs=3)
        >>> tokens = list(generation)
        >>> [dist.token for dist in generation.dists] == tokens, len(generation.dists[0].topk(3))
        (True, 3)
        """
        if self._logprobs is None:
            raise Invalid("no log-probabilities were asked for: give generate() logprobs=5, or 0 for its tokens alone")
        self._require_settled()
        return self._dists

    def came(self, start: int, stop: int) -> tuple[list[int], list[ReducedDist | None]]:
        """Return tokens and their distributions, from `start` to `stop`, without counting them as read.

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=3)
        >>> list(generation)[1:] == generation.came(1, 3)[0]
        True
        """
        return self._tokens[start:stop], self._dists[start:stop]

    @property
    def pending(self) -> list[int]:
        """The last tokens, which are not in the file. Give them first to the next call. Invalid: see `cancel`.

        If the generation ended before the given tokens were in the file, the given tokens are pending.
        """
        self._require_settled()
        if self._left is not None:
            return list(self._left)
        if self._length_before is None:
            return list(self._given)
        num_appended = self._num_entries - self._length_before
        return self._tokens[num_appended:]

    @property
    def num_entries(self) -> int | None:
        """The file's length after the last appended token. None: unknown."""
        return None if self._length_before is None else self._num_entries

    @property
    def is_over(self) -> bool:
        """Whether the generation has ended, with or without an error."""
        return self._is_over

    @property
    def is_lost(self) -> bool:
        """Whether an error, a cancellation or the deadline ended the generation before its first token."""
        return self._is_over and not self._tokens and self.finish in {None, "cancelled", "deadline"}

    @property
    def is_complete(self) -> bool:
        """Whether the generation ended by itself. False: it still runs, has failed, or was cut off before its end.

        >>> grammar = sym.Grammar.regex("abc")
        >>> cut = sym.generate(sym.kv_create(), [65], grammar=grammar, max_tokens=2)
        >>> cut.full_text(), cut.finish, cut.is_complete
        ('ab', 'length', False)
        """
        if self._is_guided:
            return self.finish in {"grammar", "stop_token"}
        return self.finish in {"stop_token", "stop_text"}

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` or the daemon cancelled the generation. A deadline does not count as a cancellation."""
        return self._is_cancelled or self.finish == "cancelled"

    @property
    def is_read(self) -> bool:
        """Whether the program has read any token."""
        return self.num_read > 0 or self.num_read_bytes > 0

    def read_part(self) -> Script[tuple[int | None, list[int]]]:
        """Return the length of the file with only those tokens that the program has read, and the pending tokens.

        The caller cuts the file to that length. The length is None if the file needs no cut.

        >>> kv = sym.kv_create()
        >>> generation = sym.generate(kv, [65], max_tokens=2)
        >>> list(generation)[1:] == kv.channel.run(generation.read_part())[1]
        True
        """
        vocabulary = yield from vocabulary_script(self._kv.channel)
        num_read = sum(len(vocabulary[token]) for token in self._tokens[: self.num_read])
        num_bytes = max(num_read, self.num_read_bytes)
        if self.finish == "stop_text" and not self._keeps_stop:
            num_bytes = min(num_bytes, self._stop_at(vocabulary))
        return (yield from self._part(num_bytes, vocabulary))

    def drop_stop(self) -> Script[None]:
        """Cut the file where the stop text begins, if `keep_stop` is False and the program has not cut the file.

        The generation calls this method when the program has read the last token.

        >>> kv = sym.kv_create()
        >>> generation = sym.generate(kv, [65], grammar=sym.Grammar.regex("abcd"), stop="c", keep_stop=False)
        >>> list(generation), kv.len(), generation.pending
        ([97, 98, 99], 1, [97, 98])
        """
        if self.finish != "stop_text" or self._keeps_stop or self._left is not None:
            return
        if self._kv.closed or self._kv.num_cuts != self._num_cuts:
            return
        vocabulary = yield from vocabulary_script(self._kv.channel)
        length, left = yield from self._part(self._stop_at(vocabulary), vocabulary)
        if length is not None:  # a direct call: KV.truncate would count as a cut by the program, and void `pending`
            yield Call(Op.KV_TRUNCATE, handle=self._kv.handle, args=(length, 0, 0, 0))
            self._num_entries = length
        self._left = left

    def _stop_at(self, vocabulary: Sequence[bytes]) -> int:
        """Return the number of bytes of the text before the stop text."""
        text = b"".join(vocabulary[token] for token in self._tokens)
        return min(at for stop in self.stop_texts if (at := text.find(stop.encode())) >= 0)

    def _part(self, num_bytes: int, vocabulary: Sequence[bytes]) -> Script[tuple[int | None, list[int]]]:
        """Return the length and the pending tokens, as `read_part` does, for a file that keeps the first `num_bytes`
        bytes of the text.

        Whole tokens are kept. If the cut falls inside a token, the first part of its text is tokenized again.
        """
        assert self._length_before is not None
        ends = list(accumulate(len(vocabulary[token]) for token in self._tokens))
        num_whole = num_kept = bisect_right(ends, num_bytes)
        text, rest = b"".join(vocabulary[token] for token in self._tokens[: num_whole + 1]), b""
        for num_kept in range(num_whole, max(-1, num_whole - _MAX_CHAR_BYTES), -1):
            rest = text[ends[num_kept - 1] if num_kept else 0 : num_bytes]
            if _is_text(rest):
                break
        else:
            num_kept, rest = num_whole, b""  # the bytes are not the beginning of a character
        left = (yield from script_of(tokenize)(rest.decode(), special=False)) if rest else []
        num_appended = self._num_entries - self._length_before
        if num_appended > num_kept:
            return self._length_before + num_kept, left
        return None, self._tokens[num_appended:num_kept] + left

    def __dir__(self) -> list[str]:
        """List the names for programs, without those for libsym's own modules."""
        names = [name for name in super().__dir__() if name not in _INTERNAL]
        return [name for name in names if name == "is_complete" or not name.startswith(("is_", "num_"))]

    def __repr__(self) -> str:
        state = "failed" if self._has_failed else "cancelled" if self._ends_early else "under way"
        return f"<{type(self).__name__}: {len(self._tokens)} tokens, {self.finish or state}>"

    def take(self, reply: Reply) -> None:
        """Add a whole reply to the results, or nothing. Ctrl-C cannot interrupt this method after its last function
        call.

        See `Reply` for the reason.
        """
        count, num_entries, finish, stopped_by = reply.args
        ending, tokens = _ENDINGS.get(finish), array("i", reply.payload[: 4 * count])
        dists = list[ReducedDist | None]()
        if self._logprobs is not None:
            dists += drawn_dists(reply.payload[4 * count :], count, self._logprobs)
        # The given tokens are in the file, unless the call was ended before its first token.
        if self._length_before is None and (count or reply.more or ending not in {"cancelled", "deadline"}):
            self._length_before = num_entries
        self._tokens += tokens
        self._dists += dists
        self._num_entries = num_entries
        if not reply.more:
            self._is_over = True
            self.finish = ending
            if self.finish == "stop_token":
                self.stopped_by = stopped_by
            elif self.finish == "stop_text":
                self.stopped_by = self.stop_texts[stopped_by]

    def _note_read(self, pieces: TextPieces) -> None:
        """Note that the program has read these pieces."""
        self.num_read = max(self.num_read, pieces.num_tokens)
        self.num_read_bytes = max(self.num_read_bytes, pieces.num_bytes)

    def _take_tokens(self, tokens: list[int], first_entries: int, num_entries: int) -> None:
        """Add the tokens of a reply that is not the last."""
        if self._length_before is None:
            self._length_before = first_entries
        self._tokens += tokens
        self._num_entries = num_entries

    def _end_by(self, error: SymError) -> None:
        """Note the error that ended the call. Raise the error, unless it is a cancellation."""
        if error.errno != errno.ECANCELED:
            self._has_failed = self._is_over = True
            raise error
        self.finish, self._is_over = "cancelled", True

    @property
    def _ends_early(self) -> bool:
        """Whether the generation was ended by `cancel`, or because its handle closed, removed or truncated the file."""
        return self._is_cancelled or self._kv.closed or self._kv.num_cuts != self._num_cuts

    def _require_settled(self) -> None:
        if not self._is_over and self._ends_early:
            raise Invalid(
                "the generation was cancelled, and its last tokens are not here yet: take them, or wait for the end "
                "(`generation.cancel()`, in an event loop `await generation.cancel()`)"
            )


class Generation(Progress):
    """A running generation, as an iterator of its tokens. Only one thread may wait for tokens; a second thread gets
    Invalid.

    >>> with sym.generate(sym.kv_create(), [65], max_tokens=100) as generation:
    ...     first = next(generation)
    >>> list(generation) == generation.tokens[1:]
    True
    """

    def __init__(self, kv: OpenFile, call: Call, state: Started) -> None:
        super().__init__(kv, state)
        self._num_given = 0
        self._failure: SymError | None = None  # an error that ended a cancelled generation; the next fetch raises it
        self._stream = kv.channel.stream(call)
        self._stream.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        while self._num_given >= len(self._tokens):
            if not self._fetch():
                raise StopIteration
        self._num_given += 1
        self.num_read = max(self.num_read, self._num_given)
        return self._tokens[self._num_given - 1]

    def text(self, *, special: bool = True) -> Iterator[str]:
        """Iterate over the text of all tokens, from the first on, in whole characters, without the stop text.

        `special=False`: leave out the text of special tokens.

        >>> pads = sym.Sampler(temperature=0, logit_bias={258: 999.0})
        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=2, sampler=pads)
        >>> "".join(generation.text()), "".join(generation.text(special=False))
        ('<pad><pad>', '')

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=3, grammar=sym.Grammar.regex("abc"))
        >>> "".join(generation.text())
        'abc'
        """
        pieces = TextPieces(self.channel.run(texts_script(self.channel, special=special)), self.stop_texts)
        num_taken = 0
        while True:
            new, num_taken = self._tokens[num_taken:], len(self._tokens)
            if piece := pieces.add(new):
                self._note_read(pieces)
                yield piece
            if num_taken == len(self._tokens) and not self._fetch():
                break
        piece = pieces.end(self.finish)
        self._note_read(pieces)
        if piece:
            yield piece

    def full_text(self) -> str:
        """Wait for the last token and return the whole text.

        >>> sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.regex("abc")).full_text()
        'abc'
        """
        return "".join(self.text())

    @property
    def channel(self) -> ClientChannel:
        return self._kv.channel

    def cancel(self) -> None:
        """End the generation within a step. Tokens that have arrived can still be read.

        When `cancel` returns, `tokens` and `pending` are final, and the file is free for the next call. But if another
        thread waits for tokens, that thread gets the last tokens. Until it has them, `tokens` and `pending` raise
        Invalid.

        >>> generation = sym.generate(sym.kv_create(), [65])
        >>> first = next(generation)
        >>> generation.cancel()
        >>> generation.finish, first == generation.tokens[0]
        ('cancelled', True)
        """
        self._is_cancelled = True
        self._stream.cancel()
        try:
            while self._fetch():
                pass
        except SymError as error:
            if self._stream.is_over:  # else another thread waits for tokens
                self._failure = error.with_traceback(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.cancel()

    def _fetch(self) -> bool:
        """Wait for the next tokens. False: the generation is over, and no more tokens arrive."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._stream.is_over or self._is_over:
            self._is_over = True
            self.channel.run(self.drop_stop())
            return False
        try:
            if self._logprobs is not None or not self._stream.tokens(self._take_tokens):
                self._stream.next(self.take)
        except SymError as error:
            if not self._stream.is_over:
                raise
            self._end_by(error)
        return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def texts_script(channel: ClientChannel, *, special: bool) -> Script[Sequence[bytes]]:
    """Return the bytes of each token. With `special=False`, special tokens have no bytes."""
    vocabulary = yield from vocabulary_script(channel)
    if special:
        return vocabulary
    hidden = (yield from script_of(model_info)()).special_ids
    return [b"" if token in hidden else text for token, text in enumerate(vocabulary)]


class TextPieces:
    """Converter of tokens into text, in pieces that no later token changes."""

    def __init__(self, vocabulary: Sequence[bytes], stop_texts: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._stops = [text.encode() for text in stop_texts]
        self._held = b""  # bytes that may begin a stop text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # end of each token in the text, in bytes
        self._num_decoded = 0
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes of text that have been returned so far."""
        return self._num_decoded - len(self._decoder.getstate()[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose whole text has been returned so far."""
        return bisect_right(self._ends, self.num_bytes)

    def add(self, tokens: Iterable[int]) -> str:
        for token in tokens:
            self._held += self._vocabulary[token]
            self._ends.append(self._num_decoded + len(self._held))
        if self._is_over:
            return ""
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._is_over = True
            return self._decoded(min(found), final=True)
        return self._decoded(len(self._held) - self._num_open())

    def end(self, finish: str | None) -> str:
        """Return the text that was held back, after the caller has added the last token."""
        if self._is_over or finish == "stop_text":
            return ""
        return self._decoded(len(self._held), final=True)

    def _decoded(self, num_bytes: int, *, final: bool = False) -> str:
        """Release the first `num_bytes` held bytes, and return their text."""
        sure, self._held = self._held[:num_bytes], self._held[num_bytes:]
        self._num_decoded += num_bytes
        return self._decoder.decode(sure, final=final)

    def _num_open(self) -> int:
        """Return the length of the longest suffix of the held bytes that is a prefix of a stop text."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True, slots=True)
class Started:
    """Facts about a request that the `Progress` of its generation needs."""

    seed: int
    stop_texts: tuple[str, ...] = ()
    tokens: Sequence[int] = ()
    """Tokens that the program gave."""
    logprobs: int | None = None
    keeps_stop: bool = True
    """Whether a stop text stays in the file."""
    is_guided: bool = False
    """Whether a grammar guides the generation."""


def generate_call(
    kv: OpenFile,
    tokens: Iterable[int],
    options: Options,
    positions: Positions = None,
) -> tuple[Call, Started]:
    """Return the request of a generation, and the facts that its `Progress` needs."""
    grammar, draft = options.get("grammar"), options.get("draft")
    max_tokens, logprobs, seed = options.get("max_tokens"), options.get("logprobs"), options.get("seed")
    channel_of(kv, "generate")
    ids = int32(tokens, "token")
    places = places_of(positions, len(ids))
    check_max_tokens(max_tokens)
    sampler = sampler_of(options)
    seed = sampler.seed if seed is None else seed
    seed = random_seed() if seed is None else seed64(seed)
    texts, stop_tokens = checked_stops(options.get("stop", ()))
    said: dict[str, Any] = {"stop_at_end": bool(options.get("stop_at_end", True))}
    if stop_tokens:
        said["stop_tokens"] = stop_tokens
    if texts:
        said["stop"] = texts
    if grammar is not None:
        if not isinstance(grammar, Grammar):
            raise Invalid(f"grammar={grammar!r}: give sym.Grammar.json(schema), .regex, .lark or .gbnf")
        utf8(grammar.source, "the grammar")
        said["grammar"] = {"kind": grammar.kind, "source": grammar.source}
    if draft is not None:
        ngram = Ngram() if draft == "ngram" else draft
        if not isinstance(ngram, Ngram):
            raise Invalid(f"draft={draft!r}: 'ngram', or sym.Ngram(max_tokens, min_match), or None")
        said["draft"] = {"max_tokens": ngram.max_tokens, "min_match": ngram.min_match}
    if logprobs is not None:
        said["logprobs"] = checked_logprobs(logprobs)
    if (turn_at := options.get("turn_at")) is not None:
        said["turn_at"] = turn_at
    if (deadline := options.get("deadline")) is not None:
        said["deadline_us"] = microseconds(deadline)
    before = options.get("before")
    looked_at = sampler.looked_at(ids if before is None else int32(before, "token"))
    block = sampler.block(before=looked_at, seed=seed, first_draw=options.get("first_draw", 0))
    payload = ids.tobytes() + places.tobytes() + block + json.dumps(said, default=operator.index).encode()
    args = (len(ids), len(places), max_tokens or 0, checked_priority(options.get("priority")))
    return Call(Op.GENERATE, 0, kv.handle, args, payload), Started(
        seed, tuple(texts), ids, logprobs, bool(options.get("keep_stop", True)), grammar is not None
    )


def sampler_of(options: Options) -> Sampler:
    """Return the sampler of a call, changed by the call's own settings. Without a sampler and settings, draws are
    greedy.
    """
    sampler = options.get("sampler")
    names = ("temperature", "top_k", "top_p", "min_p")
    settings: dict[str, Any] = {name: value for name in names if (value := options.get(name)) is not None}
    if sampler is None:
        return Sampler(**settings) if settings else Sampler.greedy()
    return replace(checked_sampler(sampler), **settings)


def checked_logprobs(logprobs: object) -> int:
    if isinstance(logprobs, bool) or not isinstance(logprobs, Integral) or not 0 <= int(logprobs) <= MAX_LOGPROBS:
        raise Invalid(f"logprobs={shown(logprobs)}: give a number of likeliest tokens, from 0 to {MAX_LOGPROBS}")
    return int(logprobs)


def check_max_tokens(max_tokens: int | None) -> None:
    if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 1):
        raise Invalid(f"max_tokens={shown(max_tokens)}: 1 or more, or None for as many as the context holds")


def checked_stops(stop: str | int | Iterable[str | int]) -> tuple[list[str], list[int]]:
    """Return the stop texts and the stop tokens of a `stop` argument."""
    each = [stop] if isinstance(stop, (str, int, Integral)) else stop
    if isinstance(each, (bytes, bytearray)) or not isinstance(each, Iterable):
        raise Invalid(f"stop={stop!r}: give a token id or a text, or a list of them")
    texts: list[str] = []
    tokens: list[int] = []
    for one in each:
        if isinstance(one, str):
            if not utf8(one, "a stop text"):
                raise Invalid("a stop text must not be empty: every text contains the empty text")
            texts.append(one)
        elif isinstance(one, Integral):
            tokens.append(int64(one, "stop token"))
        else:
            raise Invalid(f"stop={one!r}: token ids and texts can end a generation")
    if len(texts) > MAX_STOP_TEXTS or any(len(text) > MAX_STOP_TEXT_CHARS for text in texts):
        raise Invalid(
            f"stop: {len(texts)} texts of up to {max(map(len, texts))} characters: at most {MAX_STOP_TEXTS} are "
            f"possible, of at most {MAX_STOP_TEXT_CHARS} characters"
        )
    return texts, tokens
