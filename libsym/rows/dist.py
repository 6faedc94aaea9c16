"""Distributions over the next token: views of logits in shared memory, and the arithmetic over them.

A `Dist` does not copy its rows, which lie in result slots of the connection's region. The slots are free again when the
`Dist` and all its views are gone. So a loop that holds one `Dist` at a time needs two slots.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Self

from libsym._channel import ffi, lib
from libsym.arguments import int64, real, shown
from libsym.errors import Invalid
from libsym.rows.attention import Attention, asked
from libsym.rows.likeliest import Likeliest
from libsym.rows.native import Allowed, check_limits, checked, pointer, uniform
from libsym.rows.notebook import SHOWN_TOKENS, likeliest_tokens, token_table

__all__ = ["Dist", "uniform"]

_REPR_TOKENS = 5
_new_unset = ffi.new_allocator(should_clear_after_alloc=False)


class Dist:
    """The distribution of the next token: one row of logits, or with rows="all" a row after every token.

    Methods use the last row. `dist[i]` is the distribution after the i-th token, `len(dist)` the number of rows.
    Logarithms are natural. Invalid: a row has NaN or +inf, so that no answer would have a meaning.

    `allowed` makes all other tokens impossible: a TokenSet, token ids, a bool for each token, or a bitmask over the
    vocabulary (bytes, bytearray or memoryview; token i is bit i % 8 of byte i // 8, in whole words of 4 bytes).

    >>> dist = sym.Dist.of([0.0, 2.0, 1.0])
    >>> dist.argmax(), dist.argmax(allowed=[0, 2])
    (1, 2)
    """

    __slots__ = ("_attention", "_first", "_logits", "_num_rows", "_row_bytes", "_vocab_size")

    def __init__(
        self, first: Any, num_rows: int, row_bytes: int, vocab_size: int, attention: Attention | None = None
    ) -> None:
        """Wrap `num_rows` rows that lie `row_bytes` apart. `first` is a cffi pointer that owns all rows."""
        self._attention = attention
        self._first = first
        self._num_rows = num_rows
        self._row_bytes = row_bytes
        self._vocab_size = vocab_size
        self._logits: memoryview[float] | None = None  # made at its first use

    @classmethod
    def of(cls, logits: Any) -> Self:
        """Make a distribution from a sequence of logits, for instance from logits that the program has changed.

        >>> dist = sym.Dist.of([0.0, 2.0, 1.0])
        >>> len(dist), dist.vocab_size, dist.argmax()
        (1, 3, 1)
        """
        is_row = getattr(logits, "ndim", 1) == 1
        is_row = is_row and not isinstance(logits, (str, bytes, bytearray, set, frozenset, dict))
        values = array("f")
        try:
            if is_row and hasattr(logits, "__array_interface__"):  # numpy: iterating 49 152 takes 6 ms
                values.frombytes(logits.astype("f4").tobytes())
            elif is_row:
                values.extend(logits)
        except (TypeError, ValueError, OverflowError):
            values = array("f")
        if not values:
            raise Invalid(f"Dist.of() takes one row of logits, a number for each token, not {shown(logits)}")
        return cls(ffi.from_buffer("float[]", values), 1, len(values) * 4, len(values))

    @classmethod
    def mixed(cls, weighted: Iterable[tuple[Dist, float]]) -> Self:
        """Return the weighted sum of the logits of several distributions: for guidance and contrastive decoding.

        A token that is impossible in one distribution is impossible in the sum. A constant added to all logits changes
        no distribution, so weights that add up to 1 also mix log-probabilities.

        >>> with_, without = sym.Dist.of([0.0, 1.0, 3.0]), sym.Dist.of([1.0, 1.0, 2.0])
        >>> sym.Dist.mixed([(with_, 2.0), (without, -1.0)]).logits.tolist()
        [-1.0, 1.0, 4.0]
        """
        try:
            given = [(dist, weight) for dist, weight in weighted]
        except (TypeError, ValueError) as error:
            raise Invalid(f"Dist.mixed() takes pairs of a Dist and a weight: {shown(weighted)}: {error}") from error
        sizes = {dist.vocab_size if isinstance(dist, Dist) else 0 for dist, _ in given}
        if not given or len(sizes) > 1 or 0 in sizes:
            raise Invalid(f"Dist.mixed() takes pairs of a Dist and a weight, of one vocabulary, not {shown(given)}")
        weights = [real(weight, "a weight") for _, weight in given]
        if not all(map(math.isfinite, weights)):
            raise Invalid(f"Dist.mixed(): weights {shown(weights)} must be finite")
        vocab_size = sizes.pop()
        result = _new_unset("float[]", vocab_size)
        rows = [dist._floats() for dist, _ in given]  # noqa: SLF001 - of this class
        checked(lib.sym_rows_mix(ffi.new("float *[]", rows), weights, len(rows), vocab_size, result))
        return cls(result, 1, vocab_size * 4, vocab_size)

    @property
    def logits(self) -> memoryview[float]:
        """The logits: a read-only float32 view, which holds the slot. `numpy.asarray(dist.logits)` is a view, too.

        >>> import libsym as sym
        >>> sym.Dist.of([0.0, 2.0]).logits.tolist()
        [0.0, 2.0]
        """
        if self._logits is None:
            self._logits = _bytes(self._floats(), self._vocab_size * 4).cast("f")
        return self._logits

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary.

        >>> import libsym as sym
        >>> sym.Dist.of([0.0, 2.0]).vocab_size
        2
        """
        return self._vocab_size

    @property
    def attention(self) -> Attention:
        """Attention that each entry got, if the `pred` asked for attention.

        >>> sym.pred(sym.kv_create(), [65, 66], attention="entries").attention
        <Attention to 2 entries>
        """
        return asked(self._attention)

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[Dist]:
        """Iterate over the rows, each a Dist."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Dist:
        index = int64(index, "the row that is asked for")
        at = index + self._num_rows if index < 0 else index
        if not 0 <= at < self._num_rows:
            raise IndexError(f"row {index} of a Dist with {self._num_rows} rows")
        return Dist(self._row(at), 1, self._row_bytes, self._vocab_size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a view for numpy, of shape [vocab], or [rows, vocab] if there are several rows."""
        numpy = sys.modules["numpy"]  # numpy calls this method, so numpy is loaded already
        rows = numpy.ndarray(
            (self._num_rows, self._vocab_size), numpy.float32, self._all_bytes(), strides=(self._row_bytes, 4)
        )
        found = rows[0] if self._num_rows == 1 else rows
        return numpy.asarray(found, dtype) if copy is None else numpy.array(found, dtype, copy=copy)

    def __repr__(self) -> str:
        if self._first is None:
            return "<Dist closed>"
        rows = f", {self._num_rows} rows" if self._num_rows > 1 else ""
        try:
            likeliest = self.topk(min(_REPR_TOKENS, self._vocab_size))
        except Invalid:
            return f"<Dist of {self._vocab_size} tokens{rows}, which has NaN, +inf, or nothing possible>"
        return f"<Dist of {self._vocab_size} tokens{rows}: {likeliest_tokens(likeliest, self._vocab_size)}>"

    def _repr_html_(self) -> str | None:
        """Return a table of the likeliest tokens as HTML. None: the row has NaN, or the Dist is closed.

        A notebook keeps the objects that it shows (`_`, `Out`), perhaps for hours. So this method copies the rows, and
        frees their slots.
        """
        if self._first is None:
            return None
        self._first, self._logits = ffi.from_buffer("float[]", bytes(self._all_bytes())), None
        try:
            likeliest, entropy = self.topk(min(SHOWN_TOKENS, self._vocab_size)), self.entropy()
        except Invalid:  # NaN
            return None
        which = f"the last of {self._num_rows} rows, " if self._num_rows > 1 else ""
        caption = f"Dist of {self._vocab_size} tokens, {which}entropy {entropy:.2f} nats"
        return token_table(caption, likeliest, self._vocab_size)

    def close(self) -> None:
        """Release the rows now. Earlier views stay valid, and hold the slots until they are gone.

        >>> dist = sym.Dist.of([0.0, 2.0])
        >>> logits = dist.logits
        >>> dist.close()
        >>> logits[1]
        2.0
        """
        self._first = self._logits = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def argmax(self, *, allowed: Allowed | None = None) -> int:
        """Return the likeliest token; among equals the token with the lowest id.

        >>> sym.Dist.of([0.0, 3.0, 1.0, 3.0]).argmax()
        1
        """
        return checked(lib.sym_row_argmax(self._floats(), self._vocab_size, pointer(allowed, self._vocab_size)))

    def logprob(self, token: int, *, allowed: Allowed | None = None) -> float:
        """Return the log-probability of a token; -inf if the token is not allowed.

        >>> round(sym.Dist.of([1.0, 1.0]).logprob(0), 4)
        -0.6931
        """
        logits, token = self.logits, int64(token, "token")
        if not 0 <= token < self._vocab_size:
            raise Invalid(f"token {token} is not in the vocabulary of {self._vocab_size}")
        bits = pointer(allowed, self._vocab_size)
        total = ffi.new("double *")
        checked(lib.sym_row_logsumexp(self._floats(), self._vocab_size, bits, total))
        if allowed is not None and not ffi.buffer(bits)[token >> 3][0] >> (token & 7) & 1:
            return -math.inf
        return float(logits[token] - total[0])

    def entropy(self, *, allowed: Allowed | None = None) -> float:
        """Return the entropy of the distribution, in nats.

        >>> round(sym.Dist.of([5.0, 5.0, 5.0, 5.0]).entropy(), 4)
        1.3863
        """
        result = ffi.new("double *")
        bits = pointer(allowed, self._vocab_size)
        checked(lib.sym_row_entropy(self._floats(), self._vocab_size, bits, result))
        return float(result[0])

    def probs(self, *, allowed: Allowed | None = None) -> memoryview[float]:
        """Return the probabilities of all tokens, as new float32 numbers.

        >>> sym.Dist.of([0.0, 0.0, 7.0]).probs(allowed=[0, 1]).tolist()
        [0.5, 0.5, 0.0]
        """
        result = _new_unset("float[]", self._vocab_size)
        bits = pointer(allowed, self._vocab_size)
        checked(lib.sym_row_softmax(self._floats(), self._vocab_size, bits, result))
        return memoryview(ffi.buffer(result)).cast("f")

    def topk(self, k: int, *, allowed: Allowed | None = None) -> Likeliest:
        """Return the k likeliest tokens with their log-probabilities, likeliest first; among equals the lower id first.

        >>> likeliest = sym.Dist.of([1.0, 2.0, 3.0]).topk(2)
        >>> [(token, round(logprob, 2)) for token, logprob in likeliest]
        [(2, -0.41), (1, -1.41)]
        >>> likeliest.tokens
        [2, 1]
        """
        k = int64(k, "k")
        if not 1 <= k <= self._vocab_size:
            raise Invalid(f"topk({k}): k must be 1 to {self._vocab_size}, the size of the vocabulary")
        tokens, logprobs = ffi.new("int32_t[]", k), ffi.new("double[]", k)
        bits = pointer(allowed, self._vocab_size)
        checked(lib.sym_row_topk(self._floats(), self._vocab_size, bits, k, tokens, logprobs))
        return Likeliest(zip(ffi.unpack(tokens, k), ffi.unpack(logprobs, k), strict=True))

    def sample(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        *,
        seed: int | None = None,
        draw: int = 0,
        u: float | None = None,
        allowed: Allowed | None = None,
    ) -> int:
        """Draw a token from the distribution. The same row and `seed` (or `u`, in [0, 1)) give the same token.

        The steps, in this order: tokens that are not `allowed` become impossible. The logits are divided by
        `temperature` (0: the argmax). `top_k` keeps the k likeliest tokens. `top_p` keeps the likeliest tokens that
        together have this fraction of the remaining probability. `min_p` keeps the tokens with at least this fraction
        of the likeliest token's probability.
        `draw`: the index of the random number in the seed's stream. In a loop, count it up (`draw=step`), as a
        `sym.Sampler` does, which also has penalties.

        >>> dist = sym.Dist.of([0.0, 2.0, 1.0])
        >>> dist.sample(seed=7) == dist.sample(seed=7)
        True
        >>> dist.sample(temperature=0.7, top_p=0.5)
        1
        """
        check_limits(temperature, top_k, top_p, min_p)
        if u is None:
            u = uniform(int.from_bytes(os.urandom(8), "little") if seed is None else seed, draw)
        elif seed is not None or draw != 0:
            raise Invalid("sample() takes a seed, perhaps with draw, or u, not both")
        elif not 0.0 <= real(u, "u") < 1.0:
            raise Invalid(f"u={u}: must be at least 0 and below 1")
        top_k, top_p, min_p = min(top_k or 0, self._vocab_size), 1.0 if top_p is None else top_p, min_p or 0.0
        how = temperature, top_k, top_p, min_p, u
        return checked(
            lib.sym_row_sample(self._floats(), self._vocab_size, pointer(allowed, self._vocab_size), *how)
        )  # no variable holds the buffer of `allowed`: the collector crashes on a memoryview that is exported

    def _floats(self) -> Any:
        """Return a pointer to the last row for C. While the pointer exists, the slots are not freed."""
        return self._row(self._num_rows - 1)

    def _row(self, index: int) -> Any:
        first = self._first
        if first is None:
            raise Invalid("this Dist was closed: read it before")
        if index == 0:
            return first
        return ffi.gc(first + index * self._row_bytes // 4, lambda _row: first)

    def _all_bytes(self) -> memoryview:
        return _bytes(self._row(0), (self._num_rows - 1) * self._row_bytes + self._vocab_size * 4)


def _bytes(row: Any, num_bytes: int) -> memoryview:
    return memoryview(ffi.buffer(row, num_bytes)).toreadonly()
