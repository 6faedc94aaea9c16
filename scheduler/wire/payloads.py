"""Readers and checks of requests' payloads: fields, texts, JSON and ranges of numbers."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from libsym.abi import MAX_PRIORITY
from libsym.channel.server import Request
from libsym.errors import Invalid


class PayloadReader:
    """A cursor that reads the fields of a payload in order."""

    __slots__ = ("_at", "_payload")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        """Take the next bytes. Invalid: fewer bytes are left."""
        end = self._at + num_bytes
        if num_bytes < 0 or end > len(self._payload):
            raise Invalid(
                f"{num_bytes} bytes of {what} were announced, and the message has {len(self._payload) - self._at} left"
            )
        taken = self._payload[self._at : end]
        self._at = end
        return taken

    def unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size, what))

    def int32(self, count: int, what: str) -> IntArray:
        return np.frombuffer(self.take(4 * count, what), np.int32)

    @property
    def left(self) -> memoryview:
        """Return the bytes that are left, without taking them."""
        return memoryview(self._payload)[self._at :]

    def rest(self) -> bytes:
        """Take all bytes that are left."""
        return self.take(len(self._payload) - self._at, "the rest")

    def end(self) -> None:
        """Raise Invalid if bytes are left."""
        if self._at != len(self._payload):
            raise Invalid(f"the message goes on for {len(self._payload) - self._at} bytes that nothing announced")


def check_range(what: str, numbers: npt.NDArray[np.integer[Any]], limit: int, of: str) -> None:
    if numbers.size == 1 and 0 <= int(numbers[0]) < limit:
        return  # the fast path for a decode: numpy would take microseconds
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= limit):
        wrong = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        raise Invalid(f"{what} {wrong} is out of range: {of} has 0 to {limit - 1}")


def check_priority(priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise Invalid(f"a priority of {priority}: {-MAX_PRIORITY} to {MAX_PRIORITY} are possible, higher goes first")
    return priority


def deadline_of(deadline_us: int) -> float | None:
    """Return the deadline `deadline_us` microseconds from now, in the time of `time.monotonic()`; 0: no deadline."""
    if deadline_us < 0:
        raise Invalid(f"a deadline of {deadline_us} microseconds: more than 0 from now, or 0 for none")
    return time.monotonic() + deadline_us * 1e-6 if deadline_us else None


def text_of(request: Request, begin: int = 0) -> str:
    """Return a path or a text in a payload. Bytes that are not UTF-8 become surrogates.

    Names of files may have such bytes, and keep them. In other texts, the caller's `encode` refuses them.
    """
    return request.payload[begin:].decode("utf-8", "surrogateescape")


def mode_of(request: Request) -> int:
    """Return the permission bits for a new file. Invalid: other bits are set."""
    mode = request.args[0]
    if mode & ~0o7777:
        raise Invalid(f"mode {mode:#o} has more than permission bits")
    return mode


def json_of(request: Request, payload: bytes, *, max_texts: int, max_other_bytes: int) -> Any:
    """Return the JSON that a request carries: see `bounded_json`."""
    return bounded_json(request.op.name, payload, max_texts=max_texts, max_other_bytes=max_other_bytes)


def bounded_json(what: str, payload: bytes, *, max_texts: int, max_other_bytes: int) -> Any:
    """Parse JSON with bounded numbers of texts (names included) and of bytes outside of texts.

    Nothing else runs during the parse, and each value takes up to a microsecond. Without the bounds, a message full of
    `[],` would take 0.3 s.
    """
    plain = payload.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * max_texts or sum(map(len, plain.split(b'"')[::2])) > max_other_bytes:
        raise Invalid(
            f"{what} takes JSON of at most {max_texts} texts, names included, and {max_other_bytes} bytes that are no "
            "text"
        )
    try:
        return json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{what} takes JSON: {error}") from None
