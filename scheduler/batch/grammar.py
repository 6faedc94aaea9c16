"""Grammars restrict the next token, so that the generated text is JSON of a schema, matches a regex, or parses.

llguidance parses the bytes of the model's tokens; only this module uses it. A grammar is compiled in a worker's thread,
because a large schema takes a second. Masks are computed in the thread `aside`, usually while a step runs. So a grammar
uses no trio. The cost of a grammar is limited. A grammar that exceeds the limit fails its own call alone.

Each account has its own cache of compiled grammars. In a shared cache, a schema that compiles at once would tell a user
that another user has it, and one user's grammars could evict the grammars of all other users.

Text is matched byte by byte, and special tokens are never text. If only one continuation is possible, it is tokenized
as the model would do it (`forced`), and its tokens need no draws. The model's end tokens are allowed where the grammar
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
"""Largest source of a schema or a grammar."""
MAX_GBNF_CHARS = 16 << 10
"""Largest source of a GBNF grammar. Translating a source of this size takes 0.5 s in Python, if the rules name each
other.
"""
NUM_KEPT = 32
"""Maximum number of compiled grammars in the cache of one account."""
MAX_KEPT_BYTES = 512 << 10
"""Maximum number of bytes of sources in one account's cache. The compiled grammars take some 60 times as much: 30 MB.
"""
MAX_ALL_KEPT_BYTES = 8 * MAX_KEPT_BYTES
"""Maximum number of bytes of sources in all caches. Beyond that, the user with the most bytes loses grammars first."""
_LEAST_BYTES = 1 << 10
"""Least number of bytes that a source counts as: the compiled grammar of the shortest source takes 70 kB."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,  # about 7 ms a token, at worst
    step_max_items=40_000,  # 2 ms
    max_items_in_row=600,  # 3 ms a token; with llguidance's default of 2,000, 120 ms: the work grows quadratically
    max_lexer_states=20_000,  # of some 2 KiB
    verbose_errors=False,
)
_SEPARATOR = "\x02"
"""Character that no tokenizer merges with the text behind it."""


class GrammarText(Protocol):
    """Facts about the model's vocabulary that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_texts(self) -> Sequence[bytes]: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def own_encoder(self) -> Callable[[str], list[int]]: ...


class GrammarState:
    """State of one generation's parser. Only one thread at a time may use the state."""

    __slots__ = ("_matcher", "_vocab_size", "_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words: npt.NDArray[np.int32] = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def allowed(self) -> memoryview:
        """Return the tokens that may come next: 32-bit words, a bit for each token. Valid until the next call."""
        fill_next_token_bitmask(self._matcher, self._words)
        self._check()
        return memoryview(self._words.view(np.uint32)[0])

    def decide(self, token: int) -> Decision:
        """Consume a drawn token, unless it is below 0. Return the forced tokens and the tokens that may follow."""
        forced: list[int] = []
        if token >= 0:
            self.advance(token)
            forced = self.forced()
            if self.is_over:
                return Decision(np.asarray(forced, np.int32), None, is_over=True)
        return Decision(np.asarray(forced, np.int32), self.allowed(), is_over=False)

    def advance(self, token: int) -> None:
        """Consume an allowed token."""
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens that have to follow, and consume them."""
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
        """Whether the grammar allows only the end of the text now."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Invalid(f"the grammar can't go on: {_reason(self._matcher)}")


class Owner(NamedTuple):
    """Account whose cache holds a grammar: a user, or one domain of a user."""

    uid: int
    domain: int
    """Inode number of the domain's directory; 0: the user's own account."""


class Grammars:
    """Compiler of grammars for one model, with a cache for each account."""

    def __init__(self, text: GrammarText) -> None:
        self._text = text
        self.num_compiling = 0
        """Number of grammars that workers are compiling, also for callers that have gone. The interpreter must not end
        until this is 0.
        """
        self._lock = Lock()  # the trio thread takes it, too, so it is only held for moments
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = Lock()  # held while a worker makes the tokenizer
        self._kept: dict[Owner, OrderedDict[tuple[str, str], LLMatcher]] = {}

    def kept(self, owner: Owner, kind: str, source: str) -> GrammarState | None:
        """Return a grammar from the account's cache, in its initial state. None: the cache does not have it."""
        with self._lock:
            kept = self._kept.get(owner)
            if kept is None or (kind, source) not in kept:
                return None
            kept.move_to_end((kind, source))
            return GrammarState(kept[kind, source].deep_copy(), self._text.vocab_size)

    def compile(self, owner: Owner, kind: str, source: str) -> GrammarState:
        """Return a grammar in its initial state. For a worker: this may take seconds, the first time even longer."""
        with self._lock:
            self.num_compiling += 1
        try:
            return self._compile(owner, kind, source)
        finally:
            with self._lock:
                self.num_compiling -= 1

    def _compile(self, owner: Owner, kind: str, source: str) -> GrammarState:
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
            return GrammarState(matcher.deep_copy(), self._text.vocab_size)

    def _make_room(self, owner: Owner) -> None:
        """Evict the least recently used grammars of the account, and then of the largest users, down to the limits."""
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
    """The model's vocabulary in llguidance's form: the bytes of each token, and a function that tokenizes."""

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
        """Tokenize a text exactly: by the model's tokenizer if its tokens have these bytes, else by longest match."""
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
                at += 1  # no token has this byte, so no mask will allow it
        return tokens


def _described(kind: str, source: str) -> str:
    match kind:
        case "json" | "compact_json":
            try:
                schema = json.loads(source)
                if kind == "json":
                    return LLMatcher.grammar_from_json_schema(json.dumps(schema))
                if schema is True:
                    schema = {}  # means the same, and can hold the options below
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
    """Translate a GBNF grammar to Lark's notation."""
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
