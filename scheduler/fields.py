"""What a message's payload is made of, taken one after the other: every length is checked before anything is read."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
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
        """What is left, still to be taken."""
        return memoryview(self._payload)[self._at :]

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._payload) - self._at, "the rest")

    def end(self) -> None:
        """Invalid: something is left."""
        if self._at != len(self._payload):
            raise Invalid(f"the message goes on for {len(self._payload) - self._at} bytes that nothing announced")


def check_range(what: str, numbers: npt.NDArray[np.integer[Any]], limit: int, of: str) -> None:
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= limit):
        wrong = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        raise Invalid(f"{what} {wrong} is out of range: {of} has 0 to {limit - 1}")


def check_priority(priority: int) -> int:
    if not -100 <= priority <= 100:
        raise Invalid(f"a priority of {priority}: -100 to 100 are possible, higher goes first")
    return priority
