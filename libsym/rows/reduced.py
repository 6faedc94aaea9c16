"""Reduced rows. The reply to a PRED with the flag REDUCED has a few numbers for each row, and takes no result slots.

A program sends a `reduction_block()`. The daemon answers with a `RowReducer`. The program reads the reply as a
`ReducedDist`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from libsym._channel import ffi, lib
from libsym.abi import REDUCED_STRUCT, REDUCTION_STRUCT, SCORED_STRUCT
from libsym.arguments import int64, shown
from libsym.channel.hot import address
from libsym.errors import Invalid, ProtocolError
from libsym.rows.attention import Attention, asked
from libsym.rows.likeliest import Likeliest
from libsym.rows.native import checked
from libsym.rows.notebook import SHOWN_TOKENS, token_table
from libsym.rows.sampler import RowSampler
from libsym.rows.stops import TokenTexts

_NO_TOKEN = -1
NO_ROW_ENTROPY = -1.0
"""Entropy that marks a token without a row: a grammar forced the token, so the token was not drawn."""


def reduction_block(top_k: int | None = None, named: Iterable[int] = (), sampling_block: bytes | None = None) -> bytes:
    """Return the request for reduced rows: a struct sym_reduction with its tokens and its sampling."""
    tokens = list(named)
    if top_k is not None and not 1 <= top_k < 1 << 32:
        raise Invalid(f"top_k={shown(top_k)}: must be 1 or more")
    try:
        body = struct.pack(f"={len(tokens)}i", *tokens)
    except struct.error as error:
        raise Invalid(f"logprobs: token ids are whole numbers of 32 bits: {error}") from error
    head = REDUCTION_STRUCT.pack(top_k or 0, len(tokens), sampling_block is not None, 0)
    return b"".join((head, body, sampling_block or b""))


def row_bytes(top_k: int, num_named: int) -> int:
    """Return the size of a reduced row in bytes."""
    return REDUCED_STRUCT.size + top_k * SCORED_STRUCT.size + num_named * 4


class RowReducer:
    """Reducer of rows, by the reduction block of a client. Invalid: the block is malformed.

    >>> from array import array
    >>> from libsym.rows.reduced import ReducedDist, RowReducer, reduction_block
    >>> reducer = RowReducer(reduction_block(top_k=2), vocab_size=3)
    >>> row = reducer.reduce(memoryview(array("f", [0, 3, 1])), index=0)
    >>> ReducedDist(row, num_rows=1, top_k=2).argmax()
    1
    """

    __slots__ = ("_reducer", "_sampler", "_vocab_size", "row_bytes", "top_k")

    def __init__(
        self, block: bytes | bytearray | memoryview, vocab_size: int, tokens: TokenTexts | None = None
    ) -> None:
        """Read a reduction block. `tokens`: texts of the model's tokens, for a sampler with DRY's breakers."""
        data = memoryview(block).cast("B")
        if len(data) < REDUCTION_STRUCT.size:
            raise Invalid(f"a reduction of {len(data)} bytes is malformed")
        self.top_k, num_named, has_sampling, reserved = REDUCTION_STRUCT.unpack_from(data)
        end = REDUCTION_STRUCT.size + 4 * num_named
        if reserved != 0 or has_sampling > 1 or end > len(data) or (not has_sampling and end != len(data)):
            raise Invalid(f"a reduction of {len(data)} bytes is malformed")
        if self.top_k > vocab_size:
            raise Invalid(f"top_k={self.top_k}: the vocabulary has {vocab_size} tokens")
        named = struct.unpack_from(f"={num_named}i", data, REDUCTION_STRUCT.size)
        for token in named:
            if not 0 <= token < vocab_size:
                raise Invalid(f"logprobs: token {token} is not in the vocabulary of {vocab_size}")
        self._vocab_size = vocab_size
        self._sampler = RowSampler(data[end:], vocab_size, tokens) if has_sampling else None  # the reducer uses it
        sampler = ffi.NULL if self._sampler is None else ffi.cast("sym_sampler *", self._sampler.address)
        reducer = lib.sym_reducer_new(vocab_size, self.top_k, named, num_named, sampler)
        if reducer == ffi.NULL:
            raise MemoryError("no memory for a reduction")
        self._reducer: Any = ffi.gc(reducer, lib.sym_reducer_free)
        self.row_bytes = int(lib.sym_reducer_bytes(reducer))
        """Size of a reduced row in bytes."""

    @property
    def address(self) -> int:
        """Address of the C half, for the functions of `libsym.channel.hot`; valid as long as this object lives."""
        return address(self._reducer)

    def reduce(self, row: memoryview[float], index: int) -> bytes:
        """Reduce the `index`-th row of a call. A sampler draws its token with the `index`-th random number."""
        if row.nbytes != 4 * self._vocab_size:
            raise Invalid(f"a row of {row.nbytes // 4} logits for a vocabulary of {self._vocab_size}")
        result = bytearray(self.row_bytes)
        checked(
            lib.sym_reducer_reduce(self._reducer, ffi.from_buffer("float[]", row), index, ffi.from_buffer(result))
        )  # no variable holds the buffers, because the traceback of an error would keep them
        return bytes(result)


class ReducedDist:
    """Result of a `pred` with `top_k`, `logprobs` or `sampler`: the numbers that were asked for, of one or more rows.

    Methods use the last row. `dist[i]` is the i-th row, `len(dist)` the number of rows. Invalid: the `pred` did not ask
    for this number. The message names the missing option.

    >>> dist = sym.pred(sym.kv_create(), [65, 66], rows="all", top_k=2, sampler=sym.Sampler.greedy())
    >>> len(dist), dist[0].argmax(), dist[1].argmax(), dist.token
    (2, 65, 66, 66)
    """

    __slots__ = (
        "_attention",
        "_entropy",
        "_logprobs",
        "_logsumexp",
        "_named",
        "_payload",
        "_ranked",
        "_row_bytes",
        "_token",
        "_top_k",
    )

    def __init__(
        self,
        payload: bytes | memoryview,
        num_rows: int,
        top_k: int | None = None,
        named: Sequence[int] = (),
        attention: Attention | None = None,
    ) -> None:
        """Read `num_rows` reduced rows from `payload`. The request had the same `top_k` and `named`."""
        self._attention = attention
        self._top_k = top_k or 0
        self._named = tuple(named)
        self._payload = memoryview(payload)
        self._row_bytes = row_bytes(self._top_k, len(self._named))
        if num_rows < 1 or len(self._payload) != num_rows * self._row_bytes:
            raise ProtocolError(f"{num_rows} reduced rows of {self._row_bytes} bytes in {len(self._payload)} bytes")
        row = self._payload[-self._row_bytes :]
        sampled_logprob: float
        self._token: int
        self._entropy: float
        self._logsumexp: float
        self._token, sampled_logprob, self._entropy, self._logsumexp = REDUCED_STRUCT.unpack_from(row)
        ranked_end = REDUCED_STRUCT.size + self._top_k * SCORED_STRUCT.size
        self._ranked: list[tuple[int, float]] = list(SCORED_STRUCT.iter_unpack(row[REDUCED_STRUCT.size : ranked_end]))
        self._logprobs: dict[int, float] = dict(self._ranked)
        self._logprobs.update(
            zip(self._named, struct.unpack_from(f"={len(self._named)}f", row, ranked_end), strict=True)
        )
        if self._token != _NO_TOKEN:
            self._logprobs.setdefault(self._token, sampled_logprob)  # a value from the top k has more digits

    def __len__(self) -> int:
        return len(self._payload) // self._row_bytes

    def __iter__(self) -> Iterator[ReducedDist]:
        """Iterate over the rows, each a ReducedDist."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> ReducedDist:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of a ReducedDist with {len(self)} rows")
        row = self._payload[at * self._row_bytes : (at + 1) * self._row_bytes]
        return ReducedDist(row, 1, self._top_k, self._named)

    def __repr__(self) -> str:
        parts = [f"{len(self)} row{'s' if len(self) != 1 else ''}"]
        if self._top_k:
            parts.append(f"top {self._top_k}")
        if self._token != _NO_TOKEN:
            parts.append(f"token {self._token}")
        return f"<ReducedDist: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return a table of the tokens with known log-probabilities as HTML, likeliest first, and the drawn token."""
        drawn = None if self._token == _NO_TOKEN else self._token
        known = sorted(self._logprobs.items(), key=lambda each: -each[1])
        shown = [each for place, each in enumerate(known) if place < SHOWN_TOKENS or each[0] == drawn]
        caption = f"ReducedDist, {f'the last of {len(self)} rows, ' if len(self) > 1 else ''}"
        caption += f"entropy {self._entropy:.2f} nats"
        if len(shown) < len(known):
            caption += f"; {len(shown)} of {len(known)} tokens"
        return token_table(caption, shown, drawn=drawn)

    def __array__(self, *_options: Any, **_more: Any) -> Any:
        raise Invalid(f"{self!r} has no row of logits: ask pred() without top_k, logprobs and sampler")

    @property
    def attention(self) -> Attention:
        """Attention that each entry got, if the `pred` asked for attention.

        >>> sym.pred(sym.kv_create(), [65], top_k=1, attention="pages").attention
        <Attention to 1 entries>
        """
        return asked(self._attention)

    @property
    def token(self) -> int:
        """The token that the daemon drew. Invalid: the `pred` had no sampler.

        >>> import libsym as sym
        >>> kv = sym.kv_create()
        >>> 0 <= sym.pred(kv, [72, 105], sampler=sym.Sampler.greedy()).token
        True
        """
        if self._token == _NO_TOKEN:
            raise Invalid("no token was drawn: ask pred() with sampler=…")
        return self._token

    def argmax(self) -> int:
        """Return the likeliest token; among equals the token with the lowest id.

        >>> sym.pred(sym.kv_create(), [65], top_k=1).argmax()
        65
        """
        return self.topk(1)[0][0]

    def topk(self, k: int) -> Likeliest:
        """Return the k likeliest tokens with their log-probabilities, likeliest first; among equals the lower id first.

        >>> dist = sym.pred(sym.kv_create(), [65], top_k=5)
        >>> dist.topk(1).tokens
        [65]
        """
        k = int64(k, "k")
        if k < 1:
            raise Invalid(f"topk({k}): k must be 1 or more")
        if k > self._top_k:
            had = f"the {self._top_k} likeliest are" if self._top_k else "none are"
            raise Invalid(f"topk({k}): {had} here: ask pred() with top_k={k}")
        return Likeliest(self._ranked[:k])

    def logprob(self, token: int) -> float:
        """Return the log-probability of a token that is among the likeliest, was drawn, or was named by `logprobs`.

        >>> dist = sym.pred(sym.kv_create(), [65], logprobs=[65, 66])
        >>> dist.logprob(65) > dist.logprob(66)
        True
        """
        token = int64(token, "token")
        if token not in self._logprobs:
            raise Invalid(f"the log-probability of token {token} is not here: ask pred() with logprobs=[{token}]")
        return self._logprobs[token]

    def logit(self, token: int) -> float:
        """Return the logit of a token whose `logprob` is known.

        >>> dist = sym.pred(sym.kv_create(), [65], top_k=2)
        >>> (first, _), (second, _) = dist.topk(2)
        >>> dist.logit(first) > dist.logit(second)
        True
        """
        return self.logprob(token) + self._logsumexp

    def entropy(self) -> float:
        """Return the entropy of the whole distribution, in nats.

        >>> sym.pred(sym.kv_create(), [65], top_k=1).entropy() >= 0
        True
        """
        return self._entropy


def drawn_dists(payload: bytes | memoryview, count: int, top_k: int) -> list[ReducedDist | None]:
    """Return the reduced rows of a generation's tokens. None: a grammar forced the token."""
    size, found = row_bytes(top_k, 0), list[ReducedDist | None]()
    for at in range(0, count * size, size):
        _, _, entropy, _ = REDUCED_STRUCT.unpack_from(payload, at)
        found.append(None if entropy == NO_ROW_ENTROPY else ReducedDist(payload[at : at + size], 1, top_k))
    return found
