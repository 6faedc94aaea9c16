"""Rows answered by numbers: right after the step each row of logits becomes what was asked of it, and is gone.

The numbers are those of a `Dist` over the whole row, from the same C; so a program that asks for the ten likeliest
tokens of each of 10,000 entries needs no result slot for any of them.
"""

from __future__ import annotations

import errno

from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import SymError, TooLarge
from libsym.rows.native import checked
from libsym.rows.reduced import RowReducer
from libsym.rows.stops import TokenTexts
from scheduler.replies import kept


class Reduction:
    """Numbers that one call asks for of its rows, and room for the answer, which the run fills."""

    __slots__ = ("answer", "error", "reducer")

    def __init__(self, block: bytes, vocab_size: int, num_rows: int, tokens: TokenTexts) -> None:
        """`block`: `struct sym_reduction` and what follows it. TooLarge: the numbers of so many rows fit no reply."""
        self.reducer = RowReducer(block, vocab_size, tokens)
        num_bytes = num_rows * self.reducer.row_bytes
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(
                f"{num_rows} rows of {self.reducer.row_bytes} bytes are no message, which holds {PAYLOAD_BYTES}: "
                "ask for fewer tokens of each row, or give the tokens in several calls"
            )
        self.answer = bytearray(num_bytes)
        self.error: SymError | None = None
        """A row was no distribution. As with a full row, its entries are in the file."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer)


def row_failure(code: int) -> SymError:
    """Return why a row could not be drawn from, or reduced."""
    try:
        checked(-code)
    except SymError as failure:
        return kept(failure)
    except MemoryError as failure:
        return kept(SymError(str(failure), errno.ENOMEM))
    raise AssertionError("nothing failed")
