"""Reduction of rows to numbers: right after a step, the run computes the wanted numbers of each row, and drops it.

The numbers are the same as from a `Dist` over the whole row, because the same C code computes both. A program that asks
for the ten likeliest tokens of each of 10,000 entries needs no result slots.
"""

from __future__ import annotations

import errno

from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import SymError, TooLarge
from libsym.rows.native import checked
from libsym.rows.reduced import RowReducer
from libsym.rows.stops import TokenTexts
from scheduler.wire.replies import kept


class Reduction:
    """Reduction that one call asks for, with memory for the answer, which the run fills."""

    __slots__ = ("answer", "error", "reducer")

    def __init__(self, block: bytes, vocab_size: int, num_rows: int, tokens: TokenTexts | None = None) -> None:
        """Read a request. `block`: a struct sym_reduction with its data. TooLarge: the numbers do not fit one reply."""
        self.reducer = RowReducer(block, vocab_size, tokens)
        num_bytes = num_rows * self.reducer.row_bytes
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(
                f"{num_rows} rows of {self.reducer.row_bytes} bytes do not fit a message, which holds {PAYLOAD_BYTES}: "
                "ask for fewer tokens of each row, or give the tokens in several calls"
            )
        self.answer = bytearray(num_bytes)
        self.error: SymError | None = None
        """Error of a row that is not a distribution. The entries are in the file all the same, as with a full row."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer)


def row_failure(code: int) -> SymError:
    """Return the error for a row whose draw or reduction failed. `code`: its errno."""
    try:
        checked(-code)
    except SymError as failure:
        return kept(failure)
    except MemoryError as failure:
        return kept(SymError(str(failure), errno.ENOMEM))
    raise AssertionError("nothing failed")
