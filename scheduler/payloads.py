"""Payloads of requests, checked once: their fields, each length first; texts; ranges."""

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


class Fields:
    """Reads a payload from its beginning to its end."""

    __slots__ = ("_at", "_payload")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes. Invalid: there are not so many."""
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
        """Bytes that are left to be taken."""
        return memoryview(self._payload)[self._at :]

    def rest(self) -> bytes:
        """Take all that is left."""
        return self.take(len(self._payload) - self._at, "the rest")

    def end(self) -> None:
        """Invalid: something is left."""
        if self._at != len(self._payload):
            raise Invalid(f"the message goes on for {len(self._payload) - self._at} bytes that nothing announced")


def check_range(what: str, numbers: npt.NDArray[np.integer[Any]], limit: int, of: str) -> None:
    if numbers.size == 1 and 0 <= int(numbers[0]) < limit:
        return  # the decode path: a pass of numpy takes microseconds
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= limit):
        wrong = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        raise Invalid(f"{what} {wrong} is out of range: {of} has 0 to {limit - 1}")


def check_priority(priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise Invalid(f"a priority of {priority}: {-MAX_PRIORITY} to {MAX_PRIORITY} are possible, higher goes first")
    return priority


def deadline_of(deadline_us: int) -> float | None:
    """So many microseconds from now, in the time of `time.monotonic()`; 0: none."""
    if deadline_us < 0:
        raise Invalid(f"a deadline of {deadline_us} microseconds: more than 0 from now, or 0 for none")
    return time.monotonic() + deadline_us * 1e-6 if deadline_us else None


def text_of(request: Request, begin: int = 0) -> str:
    """A path or a text. What is no UTF-8 in it stays what it was: a file's name is bytes; `encode` refuses it."""
    return request.payload[begin:].decode("utf-8", "surrogateescape")


def mode_of(request: Request) -> int:
    """The permission bits of a new file."""
    mode = request.args[0]
    if mode & ~0o7777:
        raise Invalid(f"mode {mode:#o} has more than permission bits")
    return mode


def json_of(request: Request, payload: bytes, *, max_texts: int, max_other_bytes: int) -> Any:
    """Return the JSON that a request carries: see `bounded_json`."""
    return bounded_json(request.op.name, payload, max_texts=max_texts, max_other_bytes=max_other_bytes)


def bounded_json(what: str, payload: bytes, *, max_texts: int, max_other_bytes: int) -> Any:
    """JSON with so many texts at most, names included, and so many bytes that are no text.

    Nothing else runs while it is parsed, and a value takes up to a microsecond: 0.3 s for a message full of `[],`.
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
