"""Attention of a call's new tokens: the entries that they see, and, on request, how much they attend to each entry.

Steps add up one number for each layer, KV head and entry, whatever form the call asks for. Each number is one chain of
additions over the tokens in order. So its bits depend neither on how the call was cut into chunks nor on the other
calls in a step. These numbers take at most a hundredth of the memory of the KV that they describe. After the last step
the run folds the numbers to the requested form (`results.c`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder.batch import MassArray
from libsym.abi import ATTENDED_STRUCT, ATTENTION_STRUCT, FRAME_ALIGN, PAGE_ENTRIES, AttentionBy, AttentionTo
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Invalid, NoBuffers, TooLarge

MAX_USER_BYTES = 256 << 20
"""Bytes of memory for attention that all calls of one user may have at a time. A single call may take more."""


@dataclass(frozen=True, slots=True)
class EntryMask:
    """Mask of the entries that n new entries see: one row of bits over the earlier entries, or a row for each new
    entry.

    The bits stay packed until a step needs them, because many calls with large masks may be waiting.
    """

    packed: npt.NDArray[np.uint8]
    """[rows, bytes]: bit i % 8 of byte i / 8 is entry i."""
    num_columns: int
    """Number of columns. A single row covers the earlier entries.

    In a mask of n rows, each row also covers the n new entries, and a new entry sees itself.
    """

    def check(self, num_before: int, num_new: int) -> None:
        """Check the mask against the counts of earlier and new entries. Invalid: the mask does not fit."""
        num_rows = len(self.packed)
        if num_rows == num_new and self.num_columns == num_before + num_new:
            own = np.arange(num_before, self.num_columns)
            if not (self.packed[np.arange(num_new), own // 8] >> (own % 8) & 1).all():
                raise Invalid("the mask hides a token from itself: each must see its own entry")
        elif num_rows != 1 or self.num_columns != num_before:
            raise Invalid(
                f"a mask of {num_rows} rows and {self.num_columns} columns: the file has {num_before} entries, so give "
                f"one row of {num_before} for all new tokens, or {num_new} rows of {num_before + num_new}"
            )


class AnswerRoom:
    """Bytes that are free in one reply, which may answer several calls."""

    __slots__ = ("num_left",)

    def __init__(self, num_bytes: int) -> None:
        self.num_left = num_bytes

    def take(self, num_bytes: int) -> bool:
        num_bytes = -(-num_bytes // FRAME_ALIGN) * FRAME_ALIGN
        if num_bytes > self.num_left:
            return False
        self.num_left -= num_bytes
        return True


class AttentionMemory:
    """Memory for attention that calls under way use, by user."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used: dict[int, int] = {}

    def take(self, uid: int, num_bytes: int) -> None:
        """Take memory for a call. NoBuffers: other calls of this user hold too much memory."""
        used = self._used.get(uid, 0)
        if used and used + num_bytes > MAX_USER_BYTES:
            raise NoBuffers(
                f"attention to this file takes {num_bytes >> 10} KiB, and your calls under way have {used >> 10} of "
                f"{MAX_USER_BYTES >> 10}: ask for fewer at once"
            )
        self._used[uid] = used + num_bytes

    def give_back(self, uid: int, num_bytes: int) -> None:
        self._used[uid] -= num_bytes
        if not self._used[uid]:
            del self._used[uid]


class AttentionMass:
    """Attention that one call asks for: the sums that steps add to, and the answer."""

    __slots__ = (
        "_heads",
        "_layers",
        "_memory",
        "_num_taken",
        "_uid",
        "folded",
        "is_by_page",
        "is_summed",
        "room",
        "sums",
    )

    def __init__(self, wanted: bytes, layers: int, heads: int, memory: AttentionMemory, uid: int) -> None:
        """Read a request. `wanted`: a struct sym_attention. `heads`: KV heads of each layer."""
        to, by, *reserved = ATTENTION_STRUCT.unpack(wanted)
        if to not in set(AttentionTo) or by not in set(AttentionBy) or any(reserved):
            raise Invalid(f"attention to {to} by {by}: to entries (1) or pages (2), by sum (1) or layer (2)")
        self.is_by_page, self.is_summed = to == AttentionTo.PAGES, by == AttentionBy.SUM
        self.room = AnswerRoom(PAYLOAD_BYTES)
        """Free bytes of the reply that will hold the answer."""
        self.sums: MassArray = np.empty((0, 0, 0), np.float32)
        """[layers, KV heads, entries]: sums that steps add to."""
        self.folded: MassArray | None = None
        """[rows, columns]: the answer; None: `sums` is the answer."""
        self._layers, self._heads = layers, heads
        self._memory, self._uid, self._num_taken = memory, uid, 0

    def begin(self, num_entries: int) -> None:
        """Take memory for a file of `num_entries` entries, with those of the call.

        TooLarge: the answer does not fit the reply.
        """
        num_rows = self._layers * self._heads
        columns = -(-num_entries // PAGE_ENTRIES) if self.is_by_page else num_entries
        answer = (1 if self.is_summed else num_rows, columns)
        num_bytes = ATTENDED_STRUCT.size + 4 * answer[0] * columns
        if not self.room.take(num_bytes):
            remedy = "ask for less at once" if num_bytes <= PAYLOAD_BYTES else self._remedy
            what = f"attention to {num_entries} entries has {num_bytes} bytes"
            raise TooLarge(f"{what}, and the reply has room for {self.room.num_left}: {remedy}")
        self._memory.take(self._uid, num_taken := 4 * num_rows * num_entries)
        self._num_taken = num_taken
        self.sums = np.zeros((self._layers, self._heads, num_entries), np.float32)
        if self.is_by_page or self.is_summed:
            self.folded = np.zeros(answer, np.float32)

    @property
    def _remedy(self) -> str:
        if not self.is_summed:
            return "ask for its sum" if self.is_by_page else "ask for pages, or for the sum"
        return "make a shorter call" if self.is_by_page else "ask for pages"

    def answer(self) -> bytes:
        """Return the part of the reply about attention: a struct sym_attended and its numbers."""
        layers, heads = (0, 0) if self.is_summed else (self._layers, self._heads)
        numbers = self.sums if self.folded is None else self.folded
        return ATTENDED_STRUCT.pack(layers, heads, numbers.shape[-1], self.sums.shape[-1]) + numbers.tobytes()

    def let_go(self) -> None:
        """Release the memory, after the last step that adds to the sums."""
        if self._num_taken:
            self._memory.give_back(self._uid, self._num_taken)
            self._num_taken = 0
