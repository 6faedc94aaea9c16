"""Grammars: which tokens may come next, so that what is generated is JSON of a schema, matches a regex, or parses.

llguidance does the parsing, over the bytes of the model's tokens, and it is met here alone. A grammar is compiled in a
worker's thread (a large schema takes a second); masks are computed in the thread `aside`, as a rule while a step runs:
there is no trio in them. What a grammar may cost is limited; one that would cost more is an error of its own call.

Compiled grammars are kept for each account by itself: a schema that compiles at once would tell a user that another one
has it, and one user's grammars would put out everybody's.

Text is matched byte by byte and special tokens are never text. Where one continuation alone is possible, it is
tokenized as the model would (`forced`): those tokens need no draws. The model's end tokens may come where the grammar
may end.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from libsym.arguments import utf8
from libsym.errors import Invalid, SymError
from scheduler.batch.call import Decision

MAX_SOURCE_BYTES = 256 << 10
"""Of a schema or a grammar."""
MAX_GBNF_CHARS = 16 << 10
"""The translation of GBNF is Python, and takes 0.5 s for as many rules that name each other."""
NUM_KEPT = 32
"""Compiled grammars of one account that are kept for the next call with the same."""
MAX_KEPT_BYTES = 512 << 10
"""Of sources, of one account. Compiled they take some 60 times as much: 30 MB."""
MAX_ALL_KEPT_BYTES = 8 * MAX_KEPT_BYTES
"""Of sources, of all accounts. Beyond that the user who has most gives up first."""
_LEAST_BYTES = 1 << 10
"""A grammar counts for so much at least: the shortest takes 70 kB."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,  # about 7 ms a token, at worst
    step_max_items=40_000,  # 2 ms
    max_items_in_row=600,  # the work for a token grows with the square: 3 ms; 120 with llguidance's own 2,000
    max_lexer_states=20_000,  # of some 2 KiB
    verbose_errors=False,
)
_SEPARATOR = "\x02"
"""No tokenizer joins it to what follows."""


class GrammarText(Protocol):
    """Facts of the model's text side that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_texts(self) -> Sequence[bytes]: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def own_encoder(self) -> Callable[[str], list[int]]: ...


class Grammar:
    """Where one generation is in its grammar. Not safe for several threads at once."""

    __slots__ = ("_matcher", "_vocab_size", "_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words: npt.NDArray[np.int32] = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def allowed(self) -> memoryview:
        """The tokens that may come next: 32-bit words, a bit for each token. Valid until the next call."""
        fill_next_token_bitmask(self._matcher, self._words)
        self._check()
        return memoryview(self._words.view(np.uint32)[0])

    def decide(self, token: int) -> Decision:
        """Take a token that was drawn, if it is none below 0: what follows from it, and what may be drawn then."""
        forced: list[int] = []
        if token >= 0:
            self.advance(token)
            forced = self.forced()
            if self.is_over:
                return Decision(np.asarray(forced, np.int32), None, is_over=True)
        return Decision(np.asarray(forced, np.int32), self.allowed(), is_over=False)

    def advance(self, token: int) -> None:
        """Take a token that was allowed."""
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that have to follow: taken already."""
        if self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        if tokens:
            self._matcher.consume_tokens(tokens)
            self._check()
        return tokens

    @property
    def is_over(self) -> bool:
        """Whether only the end may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Invalid(f"the grammar can't go on: {_reason(self._matcher)}")


class Owner(NamedTuple):
    """The account that a grammar is kept for: a user, or one domain of a user."""

    uid: int
    domain: int
    """The inode of its directory; 0: none."""


class Grammars:
    """Compiles grammars for one model, and keeps the latest of each account."""

    def __init__(self, text: GrammarText) -> None:
        self._text = text
        self.num_compiling = 0
        """In workers' threads, also for callers that have gone: the interpreter must not end meanwhile."""
        self._lock = Lock()  # the daemon's thread takes it, so it is held for moments
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = Lock()  # held for as long as it takes to make it
        self._kept: dict[Owner, OrderedDict[tuple[str, str], LLMatcher]] = {}

    def kept(self, owner: Owner, kind: str, source: str) -> Grammar | None:
        """A grammar that was compiled for the account before: at once."""
        with self._lock:
            kept = self._kept.get(owner)
            if kept is None or (kind, source) not in kept:
                return None
            kept.move_to_end((kind, source))
            return Grammar(kept[kind, source].deep_copy(), self._text.vocab_size)

    def compile(self, owner: Owner, kind: str, source: str) -> Grammar:
        """A grammar at its beginning. For a worker's thread: it may take seconds, the first one of a model longer."""
        with self._lock:
            self.num_compiling += 1
        try:
            return self._compile(owner, kind, source)
        finally:
            with self._lock:
                self.num_compiling -= 1

    def _compile(self, owner: Owner, kind: str, source: str) -> Grammar:
        if (known := self.kept(owner, kind, source)) is not None:
            return known
        if len(source) > MAX_SOURCE_BYTES:
            raise Invalid(f"a grammar of {len(source)} characters: {MAX_SOURCE_BYTES} is the most")
        utf8(source, "the grammar")
        matcher = LLMatcher(self._model_tokenizer(), _described(kind, source), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise Invalid(f"the {kind.removeprefix('compact_')} grammar can't be used: {_reason(matcher)}")
        with self._lock:
            self._kept.setdefault(owner, OrderedDict())[kind, source] = matcher
            self._make_room(owner)
            return Grammar(matcher.deep_copy(), self._text.vocab_size)

    def _make_room(self, owner: Owner) -> None:
        """Forget the oldest: of the account while it has too many, of the largest user while all have."""
        while len(self._kept[owner]) > NUM_KEPT or _num_bytes(self._kept[owner]) > MAX_KEPT_BYTES:
            self._kept[owner].popitem(last=False)
        sizes = {each: _num_bytes(kept) for each, kept in self._kept.items()}
        while sum(sizes.values()) > MAX_ALL_KEPT_BYTES:
            users = Counter[int]()
            for each, size in sizes.items():
                users[each.uid] += size
            ((largest, _),) = users.most_common(1)
            loser = max((each for each in sizes if each.uid == largest), key=sizes.__getitem__)
            self._kept[loser].popitem(last=False)
            sizes[loser] = _num_bytes(self._kept[loser])
            if not self._kept[loser]:
                del self._kept[loser], sizes[loser]

    def _model_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    _ModelTokenizer(self._text),  # type: ignore[arg-type] # by structure
                    n_vocab=self._text.vocab_size,
                    eos_token=sorted(self._text.eos_ids),
                )
            return self._tokenizer


def _num_bytes(kept: Iterable[tuple[str, str]]) -> int:
    return sum(max(len(source), _LEAST_BYTES) for _kind, source in kept)


class _ModelTokenizer:
    """The model's vocabulary as llguidance takes one: bytes of tokens, and a function that tokenizes."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, text: GrammarText) -> None:
        if not text.eos_ids:
            raise SymError("this model declares no token that ends a text, so it can have no grammars")
        self.eos_token_id = min(text.eos_ids)
        self.tokens = list(text.token_texts)
        self.special_token_ids = sorted(text.special_ids | text.eos_ids)
        self._encode = text.own_encoder()
        special = set(self.special_token_ids)
        self._token_of = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        self._longest = max(map(len, self._token_of))

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly those of the text: the model's own where it can say it, else the longest."""
        data = text.encode() if isinstance(text, str) else text
        for prefix in ("", _SEPARATOR):  # some tokenizers put a space before a text
            tokens = self._encoded(prefix, data)
            if tokens is not None:
                return tokens
        return self._longest_tokens(data)

    def _encoded(self, prefix: str, data: bytes) -> list[int] | None:
        try:
            tokens = self._encode(prefix + data.decode())
        except (SymError, UnicodeDecodeError):
            return None
        num_before = len(b"".join(self.tokens[token] for token in tokens)) - len(data)
        begin = 0
        while num_before > 0:
            num_before -= len(self.tokens[tokens[begin]])
            begin += 1
        rest = tokens[begin:]
        return rest if b"".join(self.tokens[token] for token in rest) == data else None

    def _longest_tokens(self, data: bytes) -> list[int]:
        tokens, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._token_of.get(data[at : at + length])) is not None:
                    tokens.append(token)
                    at += length
                    break
            else:
                at += 1  # a byte that this model can't spell: no token has it, and no mask will allow it
        return tokens


def _described(kind: str, source: str) -> str:
    match kind:
        case "json" | "compact_json":
            try:
                schema = json.loads(source)
                if kind == "json":
                    return LLMatcher.grammar_from_json_schema(json.dumps(schema))
                if schema is True:
                    schema = {}  # the same: the options of what follows go into an object
                return LLMatcher.grammar_from_json_schema(
                    json.dumps(schema), {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
                )
            except (ValueError, RecursionError) as error:
                raise Invalid(f"the JSON schema can't be used: {error}") from None
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "lark":
            return LLMatcher.grammar_from_lark(source)
        case "gbnf":
            return LLMatcher.grammar_from_lark(_lark_of(source))
        case _:
            known = "'json', 'compact_json', 'regex', 'lark' and 'gbnf'"
            raise Invalid(f"a grammar of kind {kind[:40]!r}: {known} are known")


def _lark_of(source: str) -> str:
    """A GBNF grammar in Lark's notation."""
    if len(source) > MAX_GBNF_CHARS:
        raise Invalid(f"a GBNF grammar of {len(source)} characters: {MAX_GBNF_CHARS} is the most")
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # noqa: BLE001 - the translator raises every kind
        raise Invalid(f"the gbnf grammar can't be used: {' '.join(str(error).split())[:500]}") from None


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's error on one line."""
    said = " ".join(matcher.get_error().split())[:500]
    return re.sub(r"Unimplemented keys: \[(.*?)\]", r"a grammar cannot hold \1", said)
