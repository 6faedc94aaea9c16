"""generate: the loop of pred, draw, pred as one call that the daemon runs; its tokens come as they are drawn."""

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
from libsym.channel.client import ClientChannel
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid, SymError
from libsym.faces import script_of
from libsym.open_file import OpenFile, channel_of
from libsym.pred import Positions, checked_priority, checked_sampler, microseconds, places_of
from libsym.rows.reduced import ReducedDist, drawn_dists
from libsym.rows.sampler import Sampler, random_seed
from libsym.schema import closed
from libsym.status import model_info
from libsym.text import tokenize

MAX_STOP_TEXTS = 64
MAX_STOP_TEXT_CHARS = 1024
MAX_LOGPROBS = 256
MAX_DRAFT_TOKENS = 64
MAX_MATCH = 16
"""Longer runs of equal tokens are as good a sign as this."""
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
    """A rule that a generation follows: JSON of a schema, a match of a regex, a sentence of a Lark or GBNF grammar.

    >>> grammar = sym.Grammar.regex("(yes|no)")
    >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text()) in ("yes", "no")
    True
    """

    kind: Literal["json", "compact_json", "regex", "lark", "gbnf"]
    source: str

    @classmethod
    def json(cls, schema: str | Mapping[str, Any] | bool | type = True, *, compact: bool = False) -> Self:
        """JSON that a schema describes: text, what JSON can say, or a class of pydantic's; without one any JSON.

        An object has no other properties than those in `properties`, unless it names none or says
        `"additionalProperties": true`; it need not have those that are not in `required`. Between values any white
        space may come, so a model may write spaces until its tokens are used up. `compact`: none comes.

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
        """Text that a regular expression matches as a whole (of Rust's kind: no look-around, no back-references).

        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=sym.Grammar.regex("a{3}")).text())
        'aaa'
        """
        return cls("regex", _grammar_text(pattern, "a regular expression"))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text that a grammar in Lark's notation derives from `start`.

        >>> grammar = sym.Grammar.lark('start: "yes" "!"')
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text())
        'yes!'
        """
        return cls("lark", _grammar_text(grammar, "a Lark grammar"))

    @classmethod
    def gbnf(cls, grammar: str) -> Self:
        """Text that a grammar in llama.cpp's notation derives from `root`.

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
    """Drafts of up to `max_tokens` tokens: what followed where the last `min_match` tokens came before.

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
    """Options of `generate` and `Chat.ask`, for functions that hand them on."""

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
    """Options of `generate`, with those that a turn decides by itself."""

    first_draw: int
    turn_at: int
    """A turn begins behind so many of the tokens: the daemon notes it with the file. GOES_ON: the last turn goes on."""


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
    """Appends `tokens` and goes on with what the model says, token by token, without waking the program for each.

    >>> kv = sym.kv_create()
    >>> generation = sym.generate(kv, sym.tokenize("Once"), max_tokens=5)
    >>> len(list(generation)), generation.finish
    (5, 'length')
    >>> kv.len() + len(generation.pending)
    9

    It is this loop, token for token, with the same seed:

        draws, pending = sampler.start(before=tokens), tokens
        while True:
            token = draws.draw(pred(kv, pending))
            if token in stop: break
            yield token
            pending = [token]

    So the last tokens are not in the file when it has ended (`pending`): give them first to the next call.

    `sampler`: how tokens are drawn. `temperature`, `top_k`, `top_p`, `min_p`, `seed`: in place of the sampler's own.
    Without a sampler and these the likeliest is taken.
    `first_draw`: the number of the first draw among those of the seed, for what goes on where another call has ended.
    `before`: what the repetition penalty and DRY take as said before, in place of `tokens`; a file whose beginning was
    computed earlier gives its whole text.
    `stop`: token ids, which are not given out, and texts, with the end of which it ends. `stop_at_end=False`: the
    model's end tokens are tokens as others. `keep_stop=False`: once all was taken, the file ends before the token in
    which the stop text begins, and what that token has before it is `pending`. `max_tokens`: no more than these;
    without it as many as the model's context holds. `grammar`: nothing but this is possible; where one continuation
    alone is, no step is needed for it. `draft`: "ngram" tries what followed where the last tokens came before, and
    saves steps where that is right; it never changes what comes out. `logprobs`: `dists` says how likely each token
    was, and so many of the likeliest with it (0: none).
    `positions`, `priority`: as in `pred`. `deadline`: seconds from now; what has come by then is all.

    It begins at once. Other calls on the file wait for its end. It ends early with `cancel()`, at the end of a `with`
    block, or when the object is gone; and when the file is closed, removed or truncated by `kv`, which started it.
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
    """Results of a generation so far. (`Generation` and its twin in `sym.aio` take the replies.)"""

    def __init__(self, kv: OpenFile, started: Started) -> None:
        self._kv = kv  # an anonymous file must not be closed while this needs it
        self._num_cuts = kv.num_cuts
        self.seed = started.seed
        """Of the draws: with it another call gives the same."""
        self.finish: Ending | None = None
        """Why it ended; None: it has not, or by an error."""
        self.stopped_by: str | int | None = None
        """The stop text or the stop token that ended it."""
        self.stop_texts = started.stop_texts
        self._given = started.tokens
        self._logprobs = started.logprobs
        self._tokens: list[int] = []
        self._dists: list[ReducedDist | None] = []
        self._keeps_stop = started.keeps_stop
        self._is_guided = started.is_guided
        self._left: list[int] | None = None  # what is pending where the stop text was taken out of the file
        self._length_before: int | None = None  # of the file, with the tokens that were given
        self._num_entries = 0
        self._is_cancelled = False
        self._is_over = False  # the last reply was taken
        self._has_failed = False  # by an error that nobody asked for
        self.num_read = self.num_read_bytes = 0
        """Numbers of tokens that the program has read, one by one or by `tokens`, and of bytes of their text."""

    @property
    def kv(self) -> OpenFile:
        """The file that it appends to."""
        return self._kv

    @property
    def given(self) -> list[int]:
        """The tokens that it goes on from.

        >>> sym.generate(sym.kv_create(), [65], max_tokens=1).given
        [65]
        """
        return list(self._given)

    @property
    def tokens(self) -> list[int]:
        """Tokens that have come so far, whether they were given out or not. Invalid: see `cancel`."""
        self._require_settled()
        self.num_read = len(self._tokens)
        return self._tokens

    @property
    def dists(self) -> list[ReducedDist | None]:
        """Distribution of each of `tokens`, where `logprobs` asked for it; None: a grammar forced that token.

        A distribution's `token` is the drawn one, and `topk(k)` are the likeliest. `logprob(token)` is of the
        model alone, before temperature, penalties and limits.

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=2, logprobs=3)
        >>> tokens = list(generation)
        >>> [dist.token for dist in generation.dists] == tokens, len(generation.dists[0].topk(3))
        (True, 3)
        """
        if self._logprobs is None:
            raise Invalid("how likely the tokens were is not here: ask generate() with logprobs=5, or 0 for them alone")
        self._require_settled()
        return self._dists

    def came(self, start: int, stop: int) -> tuple[list[int], list[ReducedDist | None]]:
        """Return tokens, and the distributions that they were drawn from, without counting them as read.

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=3)
        >>> list(generation)[1:] == generation.came(1, 3)[0]
        True
        """
        return self._tokens[start:stop], self._dists[start:stop]

    @property
    def pending(self) -> list[int]:
        """The last tokens, which are not in the file: they go first into what is appended next. Invalid: see `cancel`.

        They are the given ones, if it ended before these were in the file.
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
        """The file's length behind the last token that was appended; None: nothing is known of it."""
        return None if self._length_before is None else self._num_entries

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by an error perhaps."""
        return self._is_over

    @property
    def is_lost(self) -> bool:
        """Whether it ended before its first token, by an error, a cancellation or its deadline."""
        return self._is_over and not self._tokens and self.finish in {None, "cancelled", "deadline"}

    @property
    def is_complete(self) -> bool:
        """Whether it ended by itself. False: it goes on, failed, or was cut off where its grammar allows no end.

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
        """Whether `cancel` was called, or the daemon ended it early for another reason than its deadline."""
        return self._is_cancelled or self.finish == "cancelled"

    @property
    def is_read(self) -> bool:
        """Whether the program has read any of it."""
        return self.num_read > 0 or self.num_read_bytes > 0

    def read_part(self) -> Script[tuple[int | None, list[int]]]:
        """Return the file's length with what was read alone (None: it is as it is), and what is pending then.

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
        """Cut the file where the stop text begins that ended it, unless that is kept, or the program cut the file.

        Whoever takes the last of the tokens has done so.

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
        if length is not None:  # not a cut of the program's, which would end what is pending
            yield Call(Op.KV_TRUNCATE, handle=self._kv.handle, args=(length, 0, 0, 0))
            self._num_entries = length
        self._left = left

    def _stop_at(self, vocabulary: Sequence[bytes]) -> int:
        """Bytes of the text before the stop text."""
        text = b"".join(vocabulary[token] for token in self._tokens)
        return min(at for stop in self.stop_texts if (at := text.find(stop.encode())) >= 0)

    def _part(self, num_bytes: int, vocabulary: Sequence[bytes]) -> Script[tuple[int | None, list[int]]]:
        """As `read_part`, of so many bytes: whole tokens, and behind them the text of one in its middle anew."""
        assert self._length_before is not None
        ends = list(accumulate(len(vocabulary[token]) for token in self._tokens))
        num_whole = num_kept = bisect_right(ends, num_bytes)
        text, rest = b"".join(vocabulary[token] for token in self._tokens[: num_whole + 1]), b""
        for num_kept in range(num_whole, max(-1, num_whole - _MAX_CHAR_BYTES), -1):
            rest = text[ends[num_kept - 1] if num_kept else 0 : num_bytes]
            if _is_text(rest):
                break
        else:
            num_kept, rest = num_whole, b""  # of a character that was none
        left = (yield from script_of(tokenize)(rest.decode(), special=False)) if rest else []
        num_appended = self._num_entries - self._length_before
        if num_appended > num_kept:
            return self._length_before + num_kept, left
        return None, self._tokens[num_appended:num_kept] + left

    def __dir__(self) -> list[str]:
        """Names that programs use; libsym's own modules know the others."""
        names = [name for name in super().__dir__() if name not in _INTERNAL]
        return [name for name in names if name == "is_complete" or not name.startswith(("is_", "num_"))]

    def __repr__(self) -> str:
        state = "failed" if self._has_failed else "cancelled" if self._ends_early else "under way"
        return f"<{type(self).__name__}: {len(self._tokens)} tokens, {self.finish or state}>"

    def take(self, reply: Reply) -> None:
        """Whole or not at all: behind the last call in it nothing can interrupt it (see `Reply`)."""
        count, num_entries, finish, stopped_by = reply.args
        ending, tokens = _ENDINGS.get(finish), array("i", reply.payload[: 4 * count])
        # Only of a call that was ended before its first token is nothing in the file, not even what was given.
        if self._length_before is None and (count or reply.more or ending not in {"cancelled", "deadline"}):
            self._length_before = num_entries
        self._tokens += tokens
        if self._logprobs is not None:
            self._dists += drawn_dists(reply.payload[4 * count :], count, self._logprobs)
        self._num_entries = num_entries
        if not reply.more:
            self._is_over = True
            self.finish = ending
            if self.finish == "stop_token":
                self.stopped_by = stopped_by
            elif self.finish == "stop_text":
                self.stopped_by = self.stop_texts[stopped_by]

    def _note_read(self, pieces: TextPieces) -> None:
        """The program is given these."""
        self.num_read = max(self.num_read, pieces.num_tokens)
        self.num_read_bytes = max(self.num_read_bytes, pieces.num_bytes)

    def _take_tokens(self, tokens: list[int], first_entries: int, num_entries: int) -> None:
        """As `take`, of replies that others follow."""
        if self._length_before is None:
            self._length_before = first_entries
        self._tokens += tokens
        self._num_entries = num_entries

    def _end_by(self, error: SymError) -> None:
        """The call ended with an error: raise it, unless it is the end that was asked for."""
        if error.errno != errno.ECANCELED:
            self._has_failed = self._is_over = True
            raise error
        self.finish, self._is_over = "cancelled", True

    @property
    def _ends_early(self) -> bool:
        """Whether `cancel` ended it; or the file was closed, removed or truncated by the handle that started it."""
        return self._is_cancelled or self._kv.closed or self._kv.num_cuts != self._num_cuts

    def _require_settled(self) -> None:
        if not self._is_over and self._ends_early:
            raise Invalid(
                "the generation was cancelled, and its last tokens are not here yet: take them, or wait for the end "
                "(`generation.cancel()`, in an event loop `await generation.cancel()`)"
            )


class Generation(Progress):
    """A generation under way: an iterator of its tokens. One thread at a time may wait for them; a second gets Invalid.

    >>> with sym.generate(sym.kv_create(), [65], max_tokens=100) as generation:
    ...     first = next(generation)
    >>> list(generation) == generation.tokens[1:]
    True
    """

    def __init__(self, kv: OpenFile, call: Call, state: Started) -> None:
        super().__init__(kv, state)
        self._num_given = 0
        self._failure: SymError | None = None  # that `cancel` met, to be raised where tokens are taken
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
        """The text of all tokens from the first on, in pieces of whole characters; without the stop text.

        `special=False`: special tokens have no text.

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
        """Return all of the text, when the last token has come.

        >>> sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.regex("abc")).full_text()
        'abc'
        """
        return "".join(self.text())

    @property
    def channel(self) -> ClientChannel:
        return self._kv.channel

    def cancel(self) -> None:
        """Ends it where it is, within a step. What had come before is still given out; the file goes on from there.

        `tokens` and `pending` are what the file is beside when this returns. Where another thread waits for the tokens,
        that thread takes the last of them, too: until it has, both raise Invalid.

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
            if self._stream.is_over:  # else another thread waits
                self._failure = error.with_traceback(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.cancel()

    def _fetch(self) -> bool:
        """Wait for more. False: it is over, and there is none."""
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
    """The bytes of each token. `special`: special tokens have some."""
    vocabulary = yield from vocabulary_script(channel)
    if special:
        return vocabulary
    hidden = (yield from script_of(model_info)()).special_ids
    return [b"" if token in hidden else text for token, text in enumerate(vocabulary)]


class TextPieces:
    """Tokens as text, in pieces that no later token changes."""

    def __init__(self, vocabulary: Sequence[bytes], stop_texts: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._stops = [text.encode() for text in stop_texts]
        self._held = b""  # may be the beginning of a stop text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # of the tokens, in bytes of the text
        self._num_decoded = 0
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the text that were given out."""
        return self._num_decoded - len(self._decoder.getstate()[0])

    @property
    def num_tokens(self) -> int:
        """Number of the tokens that were given out whole."""
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
        """Return the text that was held back, when nothing more comes."""
        if self._is_over or finish == "stop_text":
            return ""
        return self._decoded(len(self._held), final=True)

    def _decoded(self, num_bytes: int, *, final: bool = False) -> str:
        """Return the text of `num_bytes` bytes that were held back and are given out now."""
        sure, self._held = self._held[:num_bytes], self._held[num_bytes:]
        self._num_decoded += num_bytes
        return self._decoder.decode(sure, final=final)

    def _num_open(self) -> int:
        """Bytes at the end that a stop text begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True, slots=True)
class Started:
    """Facts of a request that its generation's progress needs."""

    seed: int
    stop_texts: tuple[str, ...] = ()
    tokens: Sequence[int] = ()
    """Tokens that were given."""
    logprobs: int | None = None
    keeps_stop: bool = True
    """Whether a stop text stays in the file."""
    is_guided: bool = False
    """By a grammar."""


def generate_call(
    kv: OpenFile,
    tokens: Iterable[int],
    options: Options,
    positions: Positions = None,
) -> tuple[Call, Started]:
    """Return the request, and what was chosen for it."""
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
    """The sampler of a call, with the settings that the call gives beside it; without either the likeliest is drawn."""
    sampler = options.get("sampler")
    names = ("temperature", "top_k", "top_p", "min_p")
    settings: dict[str, Any] = {name: value for name in names if (value := options.get(name)) is not None}
    if sampler is None:
        return Sampler(**settings) if settings else Sampler.greedy()
    return replace(checked_sampler(sampler), **settings)


def checked_logprobs(logprobs: object) -> int:
    if isinstance(logprobs, bool) or not isinstance(logprobs, Integral) or not 0 <= int(logprobs) <= MAX_LOGPROBS:
        raise Invalid(f"logprobs={shown(logprobs)}: of how many of the likeliest tokens, from 0 to {MAX_LOGPROBS}")
    return int(logprobs)


def check_max_tokens(max_tokens: int | None) -> None:
    if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 1):
        raise Invalid(f"max_tokens={shown(max_tokens)}: 1 or more, or None for as many as the context holds")


def checked_stops(stop: str | int | Iterable[str | int]) -> tuple[list[str], list[int]]:
    """Stop texts and stop tokens, of one or a mixture of both."""
    each = [stop] if isinstance(stop, (str, int, Integral)) else stop
    if isinstance(each, (bytes, bytearray)) or not isinstance(each, Iterable):
        raise Invalid(f"stop={stop!r}: give a token id or a text, or a list of them")
    texts: list[str] = []
    tokens: list[int] = []
    for one in each:
        if isinstance(one, str):
            if not utf8(one, "a stop text"):
                raise Invalid("a stop text must not be empty: every text has that in it")
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
