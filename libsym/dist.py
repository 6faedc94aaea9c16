"""Distributions over the next token: views of logits in shared memory, and the arithmetic over them.

A `Dist` copies nothing. Its rows lie in result slots of the connection's region, and these are the daemon's again when
the `Dist` and every view handed out from it are gone: a loop that holds one `Dist` at a time needs two slots.
"""

from __future__ import annotations

import errno
import os
from array import array
from typing import Any, Self

from libsym._channel import ffi, lib
from libsym.errors import Invalid

_SEED_MASK = (1 << 64) - 1


def uniform(seed: int) -> float:
    """The number of [0, 1) that a seed stands for; neighbouring seeds give unrelated numbers."""
    return float(lib.sym_uniform(seed & _SEED_MASK))


class Dist:
    """The distribution of the next token: one row of logits, or with rows="all" one after every token.

    Methods speak of the last row; `dist[i]` is the distribution after the i-th token, `len(dist)` says how many.
    Logarithms are natural. A row with NaN or +inf raises Invalid rather than an answer without meaning.
    """

    __slots__ = ("_num_rows", "_row", "_row_bytes", "_rows", "_vocab_size")

    def __init__(self, rows: memoryview, num_rows: int, row_bytes: int, vocab_size: int) -> None:
        """`rows`: bytes of `num_rows` rows that lie `row_bytes` apart; the view owns the slots."""
        self._rows: memoryview | None = rows
        self._num_rows = num_rows
        self._row_bytes = row_bytes
        self._vocab_size = vocab_size
        start = (num_rows - 1) * row_bytes
        self._row: memoryview[float] | None = rows[start : start + vocab_size * 4].cast("f")

    @classmethod
    def of(cls, logits: Any) -> Self:
        """A distribution of a program's own: from a sequence of floats, for instance logits that it has changed."""
        values = array("f", logits)
        return cls(memoryview(values).cast("B").toreadonly(), 1, len(values) * 4, len(values))

    @property
    def logits(self) -> memoryview[float]:
        """The logits: float32, read-only, without a copy (`numpy.asarray(dist.logits)` neither). Keeps the slot."""
        if self._row is None:
            raise Invalid("this Dist was closed: read it before")
        return self._row

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Dist:
        if self._rows is None:
            raise Invalid("this Dist was closed: read it before")
        at = index + self._num_rows if index < 0 else index
        if not 0 <= at < self._num_rows:
            raise IndexError(f"row {index} of a Dist with {self._num_rows} rows")
        return Dist(self._rows[at * self._row_bytes :], 1, self._row_bytes, self._vocab_size)

    def __repr__(self) -> str:
        if self._row is None:
            return "<Dist closed>"
        return f"<Dist of {self._vocab_size} tokens, {self._num_rows} row{'s' if self._num_rows != 1 else ''}>"

    def close(self) -> None:
        """Lets go of the rows now. Views handed out before stay valid, and keep the slots until they are gone."""
        self._rows = self._row = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def argmax(self) -> int:
        """The likeliest token; of equals the one with the lowest number."""
        return _checked(lib.sym_row_argmax(self._floats(), self._vocab_size))

    def logprob(self, token: int) -> float:
        """The logarithm of a token's probability."""
        logits = self.logits
        if not 0 <= token < self._vocab_size:
            raise Invalid(f"token {token} is not in the vocabulary of {self._vocab_size}")
        total = ffi.new("double *")
        _checked(lib.sym_row_logsumexp(self._floats(), self._vocab_size, total))
        return float(logits[token] - total[0])

    def entropy(self) -> float:
        """The entropy in nats."""
        result = ffi.new("double *")
        _checked(lib.sym_row_entropy(self._floats(), self._vocab_size, result))
        return float(result[0])

    def probs(self) -> memoryview[float]:
        """The probabilities of all tokens: float32, a copy."""
        result: Any = array("f", bytes(4 * self._vocab_size))
        _checked(lib.sym_row_softmax(self._floats(), self._vocab_size, ffi.from_buffer("float[]", result)))
        return memoryview(result)

    def topk(self, k: int) -> list[tuple[int, float]]:
        """The k likeliest tokens with their log-probabilities, likeliest first; of equals the lower number first."""
        if not 1 <= k <= self._vocab_size:
            raise Invalid(f"topk({k}): k must be 1 to {self._vocab_size}, the size of the vocabulary")
        tokens, logprobs = ffi.new("int32_t[]", k), ffi.new("double[]", k)
        _checked(lib.sym_row_topk(self._floats(), self._vocab_size, k, tokens, logprobs))
        return list(zip(ffi.unpack(tokens, k), ffi.unpack(logprobs, k), strict=True))

    def sample(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        *,
        seed: int | None = None,
        u: float | None = None,
    ) -> int:
        """A token drawn from the distribution. The same row and `seed` (or `u`, of [0, 1)) give the same token.

        In this order: the logits are divided by `temperature` (0: the argmax); `top_k` keeps the k likeliest; `top_p`
        the fewest likeliest that hold this part of what is left; `min_p` those at least this part as likely as the
        likeliest.
        In a loop give each draw a seed of its own (`seed=seed + step`): one seed draws one number.
        """
        _check_sampling(temperature, top_k, top_p, min_p, u)
        if u is None:
            u = uniform(int.from_bytes(os.urandom(8), "little") if seed is None else seed)
        elif seed is not None:
            raise Invalid("sample() takes a seed or u, not both")
        top_p, min_p = 1.0 if top_p is None else top_p, min_p or 0.0
        return _checked(lib.sym_row_sample(self._floats(), self._vocab_size, temperature, top_k or 0, top_p, min_p, u))

    def _floats(self) -> Any:
        return ffi.from_buffer("float[]", self.logits)


def _check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, u: float | None
) -> None:
    if not temperature >= 0.0:
        raise Invalid(f"temperature={temperature}: must be 0 (the argmax) or more")
    if top_k is not None and top_k < 1:
        raise Invalid(f"top_k={top_k}: must be 1 or more, or None to keep all")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise Invalid(f"top_p={top_p}: must be above 0 and at most 1, or None to keep all")
    if min_p is not None and not 0.0 <= min_p <= 1.0:
        raise Invalid(f"min_p={min_p}: must be 0 to 1, or None to keep all")
    if u is not None and not 0.0 <= u < 1.0:
        raise Invalid(f"u={u}: must be at least 0 and below 1")


def _checked(result: int) -> int:
    if result >= 0:
        return int(result)
    if result == -errno.EDOM:
        raise Invalid("the logits hold NaN or +inf: no distribution (a fault of the model, or of your own arithmetic)")
    if result == -errno.ERANGE:
        raise Invalid("every logit is -inf: no token is possible")
    if result == -errno.ENOMEM:
        raise MemoryError("no memory to sort the distribution")
    raise AssertionError(f"arithmetic over a row answered {result}")
