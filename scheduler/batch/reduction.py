"""Rows answered by numbers: in the step's thread, each row of logits becomes what was asked of it, and is gone.

The numbers are those of a `Dist` over the whole row, from the same C; so a program that asks for the ten likeliest
tokens of each of 10,000 entries needs no result slot for any of them.
"""

from __future__ import annotations

from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import SymError, TooLarge
from libsym.rows.reduced import RowReducer
from scheduler.batch.call import Rows
from scheduler.replies import kept


class Reduction:
    """What one call wants of its rows, and the answer as it grows."""

    __slots__ = ("_answer", "_first", "_reducer", "error")

    def __init__(self, block: bytes, vocab_size: int, num_tokens: int, num_rows: int) -> None:
        """`block`: `struct sym_reduction` and what follows it. TooLarge: the numbers of so many rows fit no reply."""
        self._reducer = RowReducer(block, vocab_size)
        num_bytes = num_rows * self._reducer.row_bytes
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(
                f"{num_rows} rows of {self._reducer.row_bytes} bytes are no message, which holds {PAYLOAD_BYTES}: "
                "ask for fewer tokens of each row, or give the tokens in several calls"
            )
        self._answer = bytearray(num_bytes)
        self._first = num_tokens - num_rows  # the last row is the one after the last token
        self.error: SymError | None = None
        """A row was no distribution. As with a full row, its entries are in the file."""

    def digest(self, first: int, rows: Rows) -> None:
        """Reduce rows; the first is the one after token `first`. What fails is kept for the answer: see `error`."""
        row_bytes = self._reducer.row_bytes
        try:
            for index, row in enumerate(rows, first - self._first):
                self._answer[index * row_bytes : (index + 1) * row_bytes] = self._reducer.reduce(row, index)
        except SymError as error:
            self.error = kept(error)

    @property
    def num_bytes(self) -> int:
        return len(self._answer)

    @property
    def answer(self) -> bytes:
        """The rows' numbers, once all were digested."""
        return bytes(self._answer)
