"""Arguments and results of the C code on rows (`rows.c` and others): bitmasks, ranges of settings, error codes."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from libsym._channel import ffi, lib
from libsym.arguments import draw_number, int32, real, seed64, shown
from libsym.errors import Invalid
from libsym.rows.token_set import TokenSet

Allowed = TokenSet | bytes | bytearray | memoryview | Iterable[int]
"""Tokens that may be chosen: a TokenSet, a bitmask over the vocabulary (bytes, bytearray or memoryview), token ids, or
a bool for each token of the vocabulary."""
_DIGITS = bytes([ord("0"), ord("1")]) + bytes(254)
_BOOLS = ("bool", "bool_")
"""Names of the bool types of Python and numpy."""


def uniform(seed: int, draw: int = 0) -> float:
    """Return the random number in [0, 1) of a seed's draw. The numbers of different seeds and draws are independent.

    >>> from libsym.rows.dist import uniform
    >>> uniform(0), uniform(0, draw=1), uniform(1)
    (0.6524484863740322, 0.7012121095215252, 0.36818951565166946)
    """
    return float(lib.sym_uniform(stream_of(seed, draw, "draw")))


def stream_of(seed: int, draw: int, name: str = "first_draw") -> int:
    """Return the state of a seed's stream before a draw. `name` is the argument's name, for messages."""
    return int(lib.sym_stream(seed64(seed), draw_number(draw, name)))


def bitmask_bytes(vocab_size: int) -> int:
    """Return the size of a bitmask in bytes. Token i is bit i % 32 of word i // 32, lowest first."""
    return (vocab_size + 31) // 32 * 4


def bits_of(flags: bytes) -> bytes:
    """Pack bytes of 0 or 1 into bits, lowest first, in whole words of 32 bits."""
    return int(flags[::-1].translate(_DIGITS) or b"0", 2).to_bytes(bitmask_bytes(len(flags)), "little")


def bitmask(allowed: Allowed, vocab_size: int) -> bytes | bytearray | memoryview:
    """Return `allowed` as a bitmask."""
    size = bitmask_bytes(vocab_size)
    if isinstance(allowed, TokenSet):
        if allowed.vocab_size != vocab_size:
            raise Invalid(f"allowed: {allowed!r}; this row has {vocab_size}")
        return allowed.mask()
    if isinstance(allowed, bytes | bytearray | memoryview):
        num_bytes = allowed.nbytes if isinstance(allowed, memoryview) else len(allowed)
        if num_bytes != size:
            raise Invalid(f"allowed: a bitmask of {num_bytes} bytes; for a vocabulary of {vocab_size} it has {size}")
        return allowed
    given = list(allowed) if isinstance(allowed, Iterable) and not isinstance(allowed, str) else allowed
    if isinstance(given, list) and given and type(given[0]).__name__ in _BOOLS:
        if len(given) != vocab_size:
            raise Invalid(
                f"allowed: {len(given)} bools; for a vocabulary of {vocab_size} give one for each token, or ids"
            )
        return bits_of(bytes(map(bool, given)))
    bits = bytearray(size)
    for token in int32(given, "allowed token"):
        if not 0 <= token < vocab_size:
            raise Invalid(f"allowed: token {token} is not in the vocabulary of {vocab_size}")
        bits[token >> 3] |= 1 << (token & 7)
    return bits


def pointer(allowed: Allowed | None, vocab_size: int) -> Any:
    """Return `allowed` as a pointer for C, which keeps the bitmask alive."""
    return ffi.NULL if allowed is None else ffi.from_buffer(bitmask(allowed, vocab_size))


def check_limits(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Raise Invalid if one of the settings is out of its range."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if value is not None or name == "temperature":
            real(value, name)
    if not temperature >= 0.0:
        raise Invalid(f"temperature={temperature}: must be 0 (the argmax) or more")
    if top_k is not None and (not isinstance(top_k, (int, Integral)) or top_k < 1):
        raise Invalid(f"top_k={shown(top_k)}: must be a whole number, 1 or more, or None to keep all")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise Invalid(f"top_p={top_p}: must be above 0 and at most 1, or None to keep all")
    if min_p is not None and not 0.0 <= min_p <= 1.0:
        raise Invalid(f"min_p={min_p}: must be 0 to 1, or None to keep all")


def checked(result: int) -> int:
    """Return the result of a C function, or raise its error. Invalid: the row has NaN, +inf, or no possible token."""
    if result >= 0:
        return int(result)
    if result == -errno.EDOM:
        raise Invalid("the logits hold NaN or +inf: no distribution (a fault of the model, or of your own arithmetic)")
    if result == -errno.ERANGE:
        raise Invalid("every logit is -inf: no token is possible, or none that is allowed")
    if result == -errno.ENOMEM:
        raise MemoryError("no memory to rank the distribution")
    raise AssertionError(f"arithmetic over a row answered {result}")
