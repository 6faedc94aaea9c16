"""Drawing of tokens: a `Sampler` has the settings, a `Draws` makes the draws of one loop. `sampler.c` has the
arithmetic.

`generate()` draws with the same C code in the daemon. So a loop over `pred()` with a `Draws` gives the same tokens.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

from libsym._channel import ffi, lib
from libsym.abi import (
    BIAS_STRUCT,
    SAMPLING_ALLOWED,
    SAMPLING_MORE,
    SAMPLING_MORE_STRUCT,
    SAMPLING_STREAM,
    SAMPLING_STRUCT,
)
from libsym.arguments import draw_number, int32, int64, real, seed64, shown
from libsym.channel.hot import address
from libsym.channel.process import process
from libsym.errors import Invalid
from libsym.rows.dist import Dist
from libsym.rows.native import Allowed, check_limits, checked, pointer, stream_of
from libsym.rows.parts import MAX_BREAKER_BYTES, MAX_BREAKERS, Dry, Mirostat, check_count
from libsym.rows.stops import TokenTexts, token_texts_script

_MAX_FLOAT = 3.4028234663852886e38
_MAX_TOKEN = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Settings for drawing a token from a distribution. The settings never change, so any number of loops may share
    them.

    A draw has these steps, in this order:
    - `logit_bias` (token id: number) is added to logits.
    - `repetition_penalty` (1: off) divides positive logits of tokens given or generated, and multiplies negative ones.
      `frequency_penalty` (0: off) is subtracted from a logit for each time that its token was generated.
      `presence_penalty` (0: off) is subtracted once. `penalty_window`: the three penalties count only this many latest
      tokens (None: all tokens).
    - `dry` lowers the logits of tokens that would continue a repetition.
    - Tokens that are not allowed become impossible.
    - Logits are divided by `temperature` (0: the argmax).
    - `top_k` keeps the k likeliest tokens.
    - `typical_p` keeps the fewest tokens that together have this fraction of the remaining probability, beginning with
      those whose surprise is nearest to the entropy.
    - `top_p` keeps the fewest likeliest tokens that together have this fraction of the remaining probability.
    - `min_p` keeps tokens with at least this fraction of the likeliest token's probability.
    - `mirostat` keeps tokens within its limit.
    - One of the kept tokens is drawn.

    A `seed` gives a stream of random numbers, one for each draw of a loop. The same seed and distributions give the
    same tokens. The streams of two seeds are independent, even of neighbouring seeds. Without a seed, each loop chooses
    a seed at random.

    >>> sampler = sym.Sampler(temperature=0.8, top_p=0.9, seed=1)
    >>> draws = sampler.start()
    >>> [draws.draw(sym.Dist.of([2.0, 2.0, 2.0, -9.0])) for _ in range(5)]
    [1, 2, 0, 2, 0]
    """

    temperature: float = field(default=1.0, kw_only=False)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    typical_p: float | None = None
    penalty_window: int | None = None
    dry: Dry | None = None
    mirostat: Mirostat | None = None

    def __post_init__(self) -> None:
        check_limits(self.temperature, self.top_k, self.top_p, self.min_p)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            real(getattr(self, name), name)
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise Invalid(f"repetition_penalty={self.repetition_penalty}: must be 1e-6 to 1e6; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= _MAX_FLOAT:
                raise Invalid(f"{name}={getattr(self, name)}: must be a finite number; 0 is off")
        if not isinstance(self.logit_bias, Mapping):
            raise Invalid(f"logit_bias={shown(self.logit_bias)}: must be a dict of token ids and numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a copy: the program may change the original
        for token, bias in self.logit_bias.items():
            if not isinstance(token, (int, Integral)) or not 0 <= token <= _MAX_TOKEN:
                raise Invalid(f"logit_bias: {shown(token)} is no token id")
            real(bias, f"logit_bias of token {token}")
            if not (bias == -math.inf or abs(bias) <= _MAX_FLOAT):
                raise Invalid(f"logit_bias: {bias} for token {token}: must be a finite number, or -inf for never")
        if self.seed is not None:
            seed64(self.seed)
        if self.typical_p is not None and not 0.0 < real(self.typical_p, "typical_p") <= 1.0:
            raise Invalid(f"typical_p={self.typical_p}: must be above 0 and at most 1, or None to keep all")
        if self.penalty_window is not None:
            check_count(self.penalty_window, "penalty_window")
        if self.dry is not None and not isinstance(self.dry, Dry):
            raise Invalid(f"dry={shown(self.dry)}: must be a sym.Dry, or None")
        if self.mirostat is not None and not isinstance(self.mirostat, Mirostat):
            raise Invalid(f"mirostat={shown(self.mirostat)}: must be a sym.Mirostat, or None")

    @classmethod
    def greedy(cls) -> Self:
        """Return a sampler that always draws the likeliest token.

        >>> sym.Sampler.greedy().start().draw(sym.Dist.of([0.0, 3.0, 1.0]))
        1
        """
        return cls(temperature=0.0)

    def start(
        self, before: Iterable[int] = (), *, first_draw: int = 0, vocabulary: Sequence[bytes] | None = None
    ) -> Draws:
        """Begin the draws of a loop. `before`: tokens that were given to the model, for the repetition penalty and DRY.

        `first_draw`: the serial number of the first draw, to continue where another loop has ended. `vocabulary`: the
        bytes of the model's tokens, for DRY's breakers; by default the first draw asks the daemon.

        >>> draws = sym.Sampler(temperature=0, repetition_penalty=2.0).start(before=[1])
        >>> draws.draw(sym.Dist.of([2.0, 3.0]))
        0
        >>> row, sampler = sym.Dist.of([0.0] * 9), sym.Sampler(seed=1)
        >>> draws = sampler.start()
        >>> [draws.draw(row) for _ in range(5)][3] == sampler.start(first_draw=3).draw(row)
        True
        """
        return Draws(self, before, first_draw, vocabulary)

    def looked_at(self, before: Sequence[int]) -> Sequence[int]:
        """Return the part of the given tokens on which draws depend: all tokens, the latest tokens, or none.

        >>> sym.Sampler(repetition_penalty=1.1, penalty_window=2).looked_at([1, 2, 3])
        [2, 3]
        >>> sym.Sampler(presence_penalty=1.0).looked_at([1, 2, 3])
        []
        """
        windows = [self.penalty_window] if self.repetition_penalty != 1.0 else []
        if self.dry is not None and self.dry.is_on:
            windows.append(self.dry.window)
        longest = max((len(before) if window is None else window for window in windows), default=0)
        return before[max(0, len(before) - longest) :]

    def block(
        self,
        before: Iterable[int] = (),
        generated: Iterable[int] = (),
        allowed: bytes | bytearray | memoryview | None = None,
        seed: int | None = None,
        first_draw: int = 0,
    ) -> bytes:
        """Return the settings for the wire: a struct sym_sampling and the parts that follow it.

        `seed` replaces the sampler's own seed. If both are None, a seed is chosen at random.

        >>> len(sym.Sampler(temperature=0).block(before=[1, 2, 3]))
        76
        """
        before, generated = _tokens(before), _tokens(generated)
        seed = self.seed if seed is None else seed
        looks_back, more = self.penalty_window != 0, self._more()
        settings = SAMPLING_STRUCT.pack(
            self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.min_p or 0.0,
            self.repetition_penalty if looks_back else 1.0,
            self.presence_penalty if looks_back else 0.0,
            self.frequency_penalty if looks_back else 0.0,
            min(self.top_k or 0, _MAX_TOKEN),
            stream_of(random_seed() if seed is None else seed, first_draw),
            len(self.logit_bias),
            len(before),
            len(generated),
            SAMPLING_STREAM | (0 if allowed is None else SAMPLING_ALLOWED) | (SAMPLING_MORE if more else 0),
        )
        biases = b"".join(BIAS_STRUCT.pack(token, bias) for token, bias in self.logit_bias.items())
        return b"".join((settings, more, biases, before.tobytes(), generated.tobytes(), allowed or b""))

    def _more(self) -> bytes:
        """Return a struct sym_sampling_more with its texts. If its settings are off, return no bytes, as older programs
        send.
        """
        dry = self.dry if self.dry is not None and self.dry.is_on else None
        if self.typical_p in (None, 1.0) and not (self.penalty_window or dry or self.mirostat):
            return b""
        texts = b"" if dry is None else b"".join(text.encode() + b"\0" for text in dry.breakers)
        mirostat = self.mirostat
        more = SAMPLING_MORE_STRUCT.pack(
            self.typical_p or 0.0,
            0.0 if dry is None else dry.multiplier,
            0.0 if dry is None else dry.base,
            0.0 if mirostat is None else mirostat.tau,
            0.0 if mirostat is None else mirostat.eta,
            0 if mirostat is None else mirostat.version,
            self.penalty_window or 0,
            0 if dry is None else dry.window or 0,
            0 if dry is None else dry.allowed_length,
            len(texts),
            0,
        )
        return more + texts


class RowSampler:
    """A sampler over rows of logits, made from the sampling block of a client. Only one thread may use it.

    >>> from array import array
    >>> from libsym.rows.sampler import RowSampler, Sampler
    >>> sampler = RowSampler(Sampler.greedy().block(), vocab_size=3)
    >>> sampler.draw(memoryview(array("f", [0, 3, 1])), index=0)
    1
    """

    __slots__ = ("_sampler", "vocab_size")

    def __init__(
        self, block: bytes | bytearray | memoryview, vocab_size: int, tokens: TokenTexts | None = None
    ) -> None:
        """Read a sampling block. `tokens`: texts of the model's tokens, for DRY's breakers."""
        breakers = _breakers(block, vocab_size, tokens)
        with ffi.from_buffer(block) as data:  # the block ends here: the traceback of an error would keep `data`
            size = len(data)
            sampler = lib.sym_sampler_new(data, size, vocab_size, ffi.NULL if breakers is None else breakers)
        if sampler == ffi.NULL and ffi.errno == errno.ENOMEM:
            raise MemoryError("no memory for the settings of a sampler")
        if sampler == ffi.NULL:
            wrong = [token for token in _tokens_of(bytes(block)) if not 0 <= token < vocab_size]
            if wrong:
                raise Invalid(f"token {wrong[0]} of the sampler is out of range: the vocabulary has {vocab_size}")
            raise Invalid(f"a sampling block of {size} bytes is malformed, or a setting in it is out of range")
        self._sampler: Any = ffi.gc(sampler, lib.sym_sampler_free)
        self.vocab_size = vocab_size

    @property
    def address(self) -> int:
        """Address of the C half, for the functions of `libsym.channel.hot`; valid as long as this object lives."""
        return address(self._sampler)

    def draw(self, row: memoryview[float], index: int, allowed: Allowed | None = None) -> int:
        """Return the token of the `index`-th draw, without noting it. `allowed` and the block's bitmask both apply."""
        if row.nbytes != 4 * self.vocab_size:
            raise Invalid(f"a row of {row.nbytes // 4} logits for a sampler over a vocabulary of {self.vocab_size}")
        return checked(
            lib.sym_sampler_draw(
                self._sampler, ffi.from_buffer("float[]", row), pointer(allowed, self.vocab_size), index
            )
        )  # no variable holds the buffers, because the traceback of an error would keep them

    def note(self, token: int) -> None:
        """Count a token as generated, for the penalties."""
        rc = lib.sym_sampler_note(self._sampler, token) if 0 <= token <= _MAX_TOKEN else -errno.EINVAL
        if rc == -errno.EINVAL:
            raise Invalid(f"token {token} is not in the vocabulary of {self.vocab_size}")
        checked(rc)


class Draws:
    """The draws of one loop. Each draw takes the next random number of the seed, and counts its token for penalties.

    Threads may share a Draws: they draw one after the other.

    >>> draws = sym.Sampler(temperature=0, presence_penalty=5.0).start()
    >>> [draws.draw(sym.Dist.of([1.0, 3.0, 2.0])) for _ in range(4)]
    [1, 2, 0, 1]
    """

    __slots__ = ("_before", "_first", "_lock", "_noted", "_rows", "_sampler", "_vocabulary", "index", "seed")

    def __init__(
        self,
        sampler: Sampler,
        before: Iterable[int] = (),
        first_draw: int = 0,
        vocabulary: Sequence[bytes] | None = None,
    ) -> None:
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._before = _tokens(before)
        self._noted: list[int] = []  # tokens noted before the first draw, which makes the RowSampler
        self._rows: RowSampler | None = None
        self._lock = threading.Lock()  # other Python threads run while C draws
        self._first = draw_number(first_draw)
        self.index = 0
        """Number of tokens drawn so far."""
        self.seed = random_seed() if sampler.seed is None else seed64(sampler.seed)
        """The seed of these draws. A Sampler with this seed repeats the draws."""

    def __repr__(self) -> str:
        return f"<Draws: {self.index} drawn, seed {self.seed}>"

    def draw(self, dist: Dist, allowed: Allowed | None = None) -> int:
        """Draw the next token from the distribution's last row, and count it for the penalties.

        >>> sym.Sampler.greedy().start().draw(sym.Dist.of([0.0, 3.0, 1.0]), allowed=[0, 2])
        2
        """
        if not isinstance(dist, Dist):
            raise Invalid(
                f"draw() takes a Dist, the whole row, not {shown(dist)}: ask pred() without top_k, logprobs and "
                "sampler (what the daemon drew itself is `token` of a ReducedDist)"
            )
        row = dist.logits
        with self._lock:
            if self._rows is None:
                block = self._sampler.block(self._before, self._noted, seed=self.seed, first_draw=self._first)
                self._rows = RowSampler(block, len(row), self._token_texts())
            token = self._rows.draw(row, self.index, allowed)
            self._rows.note(token)
            self.index += 1
        return token

    def note(self, token: int) -> None:
        """Count as generated a token that a grammar or the program chose, in place of a draw.

        >>> draws = sym.Sampler(temperature=0, presence_penalty=5.0).start()
        >>> draws.note(1)
        >>> draws.draw(sym.Dist.of([1.0, 3.0, 2.0]))
        2
        """
        token = int64(token, "token")
        if not 0 <= token <= _MAX_TOKEN:
            raise Invalid(f"token={token}: no vocabulary has such a token")
        with self._lock:
            if self._rows is None:
                self._noted.append(token)
            else:
                self._rows.note(token)

    def _token_texts(self) -> TokenTexts | None:
        """Return the texts of the model's tokens. None: the sampler has no breakers."""
        if self._sampler.dry is None or not self._sampler.dry.breakers:
            return None
        if self._vocabulary is not None:
            return TokenTexts(self._vocabulary)
        channel = process.channel()
        return channel.run(token_texts_script(channel))


def random_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(8), "little")


def sampling_block_bytes(payload: bytes | bytearray | memoryview, vocab_size: int) -> int:
    """Return the length of the sampling block at the beginning of a payload. Invalid: the block is incomplete."""
    with ffi.from_buffer(payload) as data:
        size = int(lib.sym_sampling_bytes(data, len(data), vocab_size))
    if size < 0:
        raise Invalid(f"a sampling block is cut short after {len(payload)} bytes")
    return size


def _tokens_of(block: bytes) -> list[int]:
    """Return the tokens in a sampling block: of biases, given and generated. Empty if the block is incomplete."""
    if lib.sym_sampling_bytes(block, len(block), 0) < 0:
        return []
    *_, num_bias, num_before, num_generated, _ = SAMPLING_STRUCT.unpack_from(block)
    begin = SAMPLING_STRUCT.size + len(_more_of(block))
    seen = begin + num_bias * BIAS_STRUCT.size
    biased = [token for token, _ in BIAS_STRUCT.iter_unpack(block[begin:seen])]
    return [*biased, *array("i", block[seen : seen + 4 * (num_before + num_generated)])]


def _more_of(block: bytes | bytearray | memoryview) -> memoryview:
    """Return the struct sym_sampling_more of a sampling block, with its texts. Empty if it is missing or incomplete."""
    data, begin = memoryview(block).cast("B"), SAMPLING_STRUCT.size
    end = begin + SAMPLING_MORE_STRUCT.size
    if len(data) < end or not SAMPLING_STRUCT.unpack_from(data)[-1] & SAMPLING_MORE:
        return data[:0]
    *_, num_bytes, _ = SAMPLING_MORE_STRUCT.unpack_from(data, begin)
    return data[begin : end + num_bytes]


def _breakers(block: bytes | bytearray | memoryview, vocab_size: int, tokens: TokenTexts | None) -> bytes | None:
    """Return a bitmask of the tokens that contain a breaker of a sampling block. None: the block has no breakers."""
    texts = bytes(_more_of(block)[SAMPLING_MORE_STRUCT.size :])
    if not texts:
        return None
    *breakers, rest = texts.split(b"\0", MAX_BREAKERS)
    if rest or not all(0 < len(each) <= MAX_BREAKER_BYTES for each in breakers):
        raise Invalid(f"breakers: {MAX_BREAKERS} texts at most, of 1 to {MAX_BREAKER_BYTES} bytes, each with a NUL")
    if tokens is None or tokens.num_tokens != vocab_size:
        raise Invalid(f"breakers are texts: the bytes of the {vocab_size} tokens are needed to find them")
    return tokens.having(tuple(breakers))


def _tokens(tokens: Iterable[int]) -> array[int]:
    return int32(tokens, "token")
