"""Checks of a call's arguments (paths, texts, numbers), and their form on the wire."""

from __future__ import annotations

import math
import operator
import os
import reprlib
from array import array
from collections.abc import Iterable
from numbers import Integral, Real

from libsym.abi import NO_TIMEOUT, RANGE_END
from libsym.errors import Invalid

Path = str | os.PathLike[str]
_SEED_MASK = (1 << 64) - 1
_ALL_PERMISSIONS = 0o7777
_UNORDERED = (set, frozenset, dict)
_MAX_SHOWN_BITS = 1 << 12
"""Messages show only numbers of fewer bits than this. Python refuses to print more than 4,300 digits."""


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < _MAX_SHOWN_BITS else f"<{x.bit_length()} bits>"


_short = _Short()
_short.maxstring = _short.maxother = 60


def shown(value: object) -> str:
    """Return the `repr` of an argument, shortened for a message."""
    return _short.repr(value)


def path_text(path: Path) -> str:
    """Return a path as text. Invalid: the path is empty, has a NUL in it, or is neither text nor path-like."""
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise Invalid(f"a path must be text, not {shown(path)}: give the name of a file on the mount (kv.path of a KV)")
    if not text or "\0" in text:
        raise Invalid(f"{text!r} is no path: it is empty or has a NUL in it")
    return text


def model_name(model: str) -> bytes:
    """Return the name of a model for a request, or raise Invalid."""
    if not isinstance(model, str) or not model or "\0" in model:
        raise Invalid(f"model={shown(model)}: give the name of a model, as model_info() and `symphony stat` show it")
    return utf8(model, "the name of a model")


def path_bytes(path: Path) -> bytes:
    """Return the bytes of a path. Bytes of a name that are not UTF-8 stay as the kernel gave them."""
    return utf8(path_text(path), "a path", "surrogateescape")


def utf8(text: str, what: str, errors: str = "strict") -> bytes:
    if not isinstance(text, str):
        raise Invalid(f"{what} must be text, not {type(text).__name__}")
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise Invalid(f"{what} has half a surrogate pair at character {error.start}, no Unicode text") from error


def int64(number: object, what: str) -> int:
    if not isinstance(number, (int, Integral)) or not -RANGE_END <= int(number) <= RANGE_END:
        raise Invalid(f"{what}={shown(number)}: must be a whole number of 64 bits")
    return int(number)


def permissions(mode: object) -> int:
    """Check permission bits. The error has an example: `mode="0600"` and `kv_create(path, "rw")` are common faults."""
    if type(mode) is int and 0 <= mode <= _ALL_PERMISSIONS:
        return mode
    if not isinstance(mode, (int, Integral)):
        raise Invalid(f"mode={shown(mode)}: must be permission bits as a whole number, as 0o600")
    return int64(mode, "mode")


def real(number: object, what: str) -> float:
    if not isinstance(number, (int, float, Real)):
        raise Invalid(f"{what}={shown(number)}: must be a number")
    try:
        return float(number)
    except OverflowError:
        raise Invalid(f"{what}={shown(number)}: is beyond every floating-point number") from None


def wait_ms(timeout: float | None) -> int:
    """Return how long a call may wait, in milliseconds. A `timeout` of None means for ever."""
    if timeout is None:
        return NO_TIMEOUT
    if not isinstance(timeout, (int, float)) or not 0 <= timeout < 1 << 40:  # false for NaN
        raise Invalid(f"timeout={shown(timeout)}: give seconds, or None to wait for ever")
    return math.ceil(timeout * 1000)


def seed64(seed: int) -> int:
    """Return a seed modulo 2^64, as C expects it. A seed is any whole number."""
    try:
        return operator.index(seed) & _SEED_MASK
    except TypeError:
        raise Invalid(f"seed={seed!r}: must be a whole number") from None


def draw_number(number: int, name: str = "first_draw") -> int:
    """Check the serial number of a draw from a seed. The first draw has number 0. The error message calls the argument
    by `name`.
    """
    if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < 1 << 63:
        raise Invalid(f"{name}={shown(number)}: the number of a draw, from 0 on")
    return int(number)


def int32(numbers: Iterable[int], what: str) -> array[int]:
    """Return token ids or positions as an array of 32-bit integers, as they go over the wire."""
    if type(numbers) is not list:  # most callers give a list; without the general checks, a decode loop is faster
        if isinstance(numbers, (str, bytes, bytearray)):
            raise Invalid(f"{what}s must be a list of whole numbers, not {shown(numbers)} (see tokenize())")
        if isinstance(numbers, _UNORDERED):
            raise Invalid(f"{what}s must be a list of whole numbers, not {shown(numbers)}, which has no order")
    try:
        return array("i", numbers)
    except OverflowError as error:
        raise Invalid(f"a {what} does not fit 32 bits") from error
    except TypeError as error:
        raise Invalid(f"{what}s must be a list of whole numbers, not {shown(numbers)} ({error})") from error
