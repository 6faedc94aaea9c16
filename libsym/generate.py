"""generate: the loop of pred, draw, pred as one call that the daemon runs; its tokens come as they are drawn."""

from __future__ import annotations

import codecs
import errno
import json
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Self

from libsym.abi import Finish, Op
from libsym.arguments import int32, seed64, utf8
from libsym.calls import Call
from libsym.client_channel import ClientChannel
from libsym.errors import Invalid, SymError
from libsym.open_file import OpenFile
from libsym.pred import Positions, checked_priority, counted_before, places_of
from libsym.reply import Reply
from libsym.sampling import Sampler, random_seed
from libsym.vocabulary import vocabulary_script

Ending = Literal["length", "stop_token", "stop_text", "grammar", "cancelled"]
_ENDINGS: dict[int, Ending] = {
    Finish.LENGTH: "length",
    Finish.STOP_TOKEN: "stop_token",
    Finish.STOP_TEXT: "stop_text",
    Finish.GRAMMAR: "grammar",
    Finish.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a generation has to be: JSON of a schema, a match of a regex, a sentence of a Lark grammar.

    >>> grammar = sym.Grammar.regex("(yes|no)")
    >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text()) in ("yes", "no")
    True
    """

    kind: Literal["json", "regex", "lark"]
    source: str

    @classmethod
    def json(cls, schema: str | Mapping[str, Any] | bool = True) -> Self:
        """JSON that a schema describes, given as text or as what JSON can say; without one any JSON.

        >>> grammar = sym.Grammar.json({"enum": ["red", "blue"]})
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text()) in ('"red"', '"blue"')
        True
        """
        if isinstance(schema, str):
            return cls("json", schema)
        try:
            return cls("json", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid(f"a JSON schema is text or what JSON can say: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole (of Rust's kind: no look-around, no back-references).

        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=sym.Grammar.regex("a{3}")).text())
        'aaa'
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text that a grammar in Lark's notation derives from `start`.

        >>> grammar = sym.Grammar.lark('start: "yes" "!"')
        >>> "".join(sym.generate(sym.kv_create(), [63], grammar=grammar).text())
        'yes!'
        """
        return cls("lark", grammar)


@dataclass(frozen=True, slots=True)
class Ngram:
    """Drafts of up to `max_tokens` tokens: what followed where the last `min_match` tokens came before.

    >>> drafted = sym.generate(sym.kv_create(), [65], max_tokens=40, draft=sym.Ngram(max_tokens=4))
    >>> list(drafted) == list(sym.generate(sym.kv_create(), [65], max_tokens=40))
    True
    """

    max_tokens: int = 8
    min_match: int = 2


def generate(
    kv: OpenFile,
    tokens: Iterable[int],
    *,
    positions: Positions = None,
    sampler: Sampler | None = None,
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    max_tokens: int | None = None,
    grammar: Grammar | None = None,
    draft: Literal["ngram"] | Ngram | None = None,
    seed: int | None = None,
    priority: int | None = None,
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

    So the last tokens are not in the file yet (`pending`): give them first to the next call.

    `sampler`: how tokens are drawn; without one the likeliest is taken. `seed`: in place of the sampler's own.
    `stop`: token ids, which are not given out, and texts, with the end of which it ends. `stop_at_end=False`: the
    model's end tokens are tokens as others. `max_tokens`: no more than these; without it as many as the model's context
    holds. `grammar`: nothing but this is possible; where one continuation alone is, no step is needed for it. `draft`:
    "ngram" tries what followed where the last tokens came before, and saves steps where that is right; it never changes
    what comes out. `positions`, `priority`: as in `pred`.

    It begins at once. Other calls on the file wait for its end. It ends early with `cancel()`, at the end of a `with`
    block, or when the object is gone.
    """
    call, state = generate_call(
        kv, tokens, positions, sampler, stop, stop_at_end, max_tokens, grammar, draft, seed, priority
    )
    return Generation(kv, call, state)


class Progress:
    """What came of a generation so far. (`Generation` and its twin in `sym.aio` take the replies.)"""

    def __init__(self, seed: int, stop_texts: Sequence[str]) -> None:
        self.tokens: list[int] = []
        """Those that have come so far, whether they were given out or not."""
        self.seed = seed
        """Of the draws: with it another call gives the same."""
        self.finish: Ending | None = None
        """Why it ended; None: it has not, or by an error."""
        self.stopped_by: str | int | None = None
        """The stop text or the stop token that ended it."""
        self.stop_texts = stop_texts
        self._length_before: int | None = None  # of the file, with the tokens that were given
        self._num_entries = 0

    @property
    def pending(self) -> list[int]:
        """The last tokens that came, which are not in the file: they go first into what is appended next."""
        if self._length_before is None:
            return []
        num_appended = self._num_entries - self._length_before
        return self.tokens[num_appended:]

    def take(self, reply: Reply) -> None:
        """Whole or not at all: behind the last call in it nothing can interrupt it (see `Reply`)."""
        count, num_entries, finish, stopped_by = reply.args
        ending, tokens = _ENDINGS.get(finish), array("i", reply.payload)
        if count:
            self.tokens += tokens
            if self._length_before is None:  # the first tokens come when what was given is in the file, and no more
                self._length_before = num_entries
        self._num_entries = num_entries
        if not reply.more:
            self.finish = ending
            if self.finish == "stop_token":
                self.stopped_by = stopped_by
            elif self.finish == "stop_text":
                self.stopped_by = self.stop_texts[stopped_by]


class Generation(Progress):
    """A generation under way: an iterator of its tokens. One thread at a time may wait for them; a second gets Invalid.

    >>> with sym.generate(sym.kv_create(), [65], max_tokens=100) as generation:
    ...     first = next(generation)
    >>> list(generation) == generation.tokens[1:]
    True
    """

    def __init__(self, kv: OpenFile, call: Call, state: Started) -> None:
        super().__init__(state.seed, state.stop_texts)
        self._kv = kv  # an anonymous file must not be closed while this needs it
        self._num_given = 0
        self._stream = kv.channel.stream(call)
        self._stream.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        while self._num_given >= len(self.tokens):
            if not self._fetch():
                raise StopIteration
        self._num_given += 1
        return self.tokens[self._num_given - 1]

    def text(self) -> Iterator[str]:
        """The text of all tokens from the first on, in pieces of whole characters; without the stop text.

        >>> generation = sym.generate(sym.kv_create(), [65], max_tokens=3, grammar=sym.Grammar.regex("abc"))
        >>> "".join(generation.text())
        'abc'
        """
        pieces = TextPieces(self.channel.run(vocabulary_script(self.channel)), self.stop_texts)
        num_taken = 0
        while True:
            new, num_taken = self.tokens[num_taken:], len(self.tokens)
            if piece := pieces.add(new):
                yield piece
            if num_taken == len(self.tokens) and not self._fetch():
                break
        if piece := pieces.end(self.finish):
            yield piece

    @property
    def channel(self) -> ClientChannel:
        return self._kv.channel

    def cancel(self) -> None:
        """Ends it where it is. What had come before is still given out; the file goes on from there.

        >>> generation = sym.generate(sym.kv_create(), [65])
        >>> first = next(generation)
        >>> generation.cancel()
        >>> rest = list(generation)
        >>> generation.finish
        'cancelled'
        """
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.cancel()

    def _fetch(self) -> bool:
        """Wait for more. False: it is over, and there is none."""
        if self._stream.is_over or self.finish is not None:
            return False
        try:
            self._stream.next(self.take)
        except SymError as error:
            if error.errno != errno.ECANCELED:
                raise
            self.finish = "cancelled"
        return True


class TextPieces:
    """Tokens as text, in pieces that no later token changes."""

    def __init__(self, vocabulary: Sequence[bytes], stop_texts: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._stops = [text.encode() for text in stop_texts]
        self._held = b""  # may be the beginning of a stop text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_over = False

    def add(self, tokens: Iterable[int]) -> str:
        self._held += b"".join(self._vocabulary[token] for token in tokens)
        if self._is_over:
            return ""
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._is_over = True
            return self._decoder.decode(self._held[: min(found)], final=True)
        num_sure = len(self._held) - self._num_open()
        sure, self._held = self._held[:num_sure], self._held[num_sure:]
        return self._decoder.decode(sure)

    def end(self, finish: str | None) -> str:
        """What was held back, when nothing more comes."""
        if self._is_over or finish == "stop_text":
            return ""
        return self._decoder.decode(self._held, final=True)

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
    """What a generation's progress has to know of its request."""

    seed: int
    stop_texts: tuple[str, ...]


def generate_call(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions,
    sampler: Sampler | None,
    stop: str | int | Iterable[str | int],
    stop_at_end: bool,
    max_tokens: int | None,
    grammar: Grammar | None,
    draft: Literal["ngram"] | Ngram | None,
    seed: int | None,
    priority: int | None,
) -> tuple[Call, Started]:
    """The request, and what was chosen for it."""
    ids = int32(tokens, "token")
    places = places_of(positions, len(ids))
    if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 1):
        raise Invalid(f"max_tokens={max_tokens!r}: 1 or more, or None for as many as the context holds")
    sampler = Sampler.greedy() if sampler is None else sampler
    seed = sampler.seed if seed is None else seed
    seed = random_seed() if seed is None else seed64(seed)
    texts, stop_tokens = _stops(stop)
    options: dict[str, Any] = {"stop_at_end": bool(stop_at_end)}
    if stop_tokens:
        options["stop_tokens"] = stop_tokens
    if texts:
        options["stop"] = texts
    if grammar is not None:
        if not isinstance(grammar, Grammar):
            raise Invalid(f"grammar={grammar!r}: give sym.Grammar.json(schema), .regex(pattern) or .lark(grammar)")
        utf8(grammar.source, "the grammar")
        options["grammar"] = {"kind": grammar.kind, "source": grammar.source}
    if draft is not None:
        ngram = Ngram() if draft == "ngram" else draft
        if not isinstance(ngram, Ngram):
            raise Invalid(f"draft={draft!r}: 'ngram', or sym.Ngram(max_tokens, min_match), or None")
        options["draft"] = {"max_tokens": ngram.max_tokens, "min_match": ngram.min_match}
    block = sampler.block(before=counted_before(sampler, ids), seed=seed)
    payload = ids.tobytes() + places.tobytes() + block + json.dumps(options, default=operator.index).encode()
    args = (len(ids), len(places), max_tokens or 0, checked_priority(priority))
    return Call(Op.GENERATE, 0, kv.handle, args, payload), Started(seed, tuple(texts))


def _stops(stop: str | int | Iterable[str | int]) -> tuple[list[str], list[int]]:
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
            tokens.append(int(one))
        else:
            raise Invalid(f"stop={one!r}: token ids and texts can end a generation")
    return texts, tokens
