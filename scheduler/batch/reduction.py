"""Rows answered by numbers: right after the step each row of logits becomes what was asked of it, and is gone.

The numbers are those of a `Dist` over the whole row, from the same C; so a program that asks for the ten likeliest
tokens of each of 10,000 entries needs no result slot for any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from libsym.abi import REDUCED_STRUCT
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import SymError, TooLarge
from libsym.rows.reduced import NO_ROW_ENTROPY, RowReducer, reduction_block
from libsym.rows.stops import TokenTexts


class Reduction:
    """What one call wants of its rows, and room for the answer, which the run fills."""

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


class TokenScores:
    """What is sent beside each token of a generation: the numbers of the row that it was drawn from."""

    __slots__ = ("latest", "reducer")

    def __init__(self, top_k: int, vocab_size: int) -> None:
        self.reducer = RowReducer(reduction_block(top_k=top_k or None), vocab_size)
        self.latest = bytearray(4 + self.reducer.row_bytes)
        """The run's: its latest token, and that token's numbers."""

    def of(self, row: memoryview[float] | None, token: int) -> bytes:
        """The numbers of a token that was drawn from this row; None: a grammar forced it."""
        if row is None:
            return REDUCED_STRUCT.pack(token, 0.0, NO_ROW_ENTROPY, 0.0).ljust(self.reducer.row_bytes, b"\0")
        numbers = bytearray(self.reducer.reduce(row, 0))
        _, _, entropy, logsumexp = REDUCED_STRUCT.unpack_from(numbers)
        REDUCED_STRUCT.pack_into(numbers, 0, token, row[token] - logsumexp, entropy, logsumexp)
        return bytes(numbers)

    def of_unsent(self, tokens: Sequence[int]) -> list[bytes]:
        """Of tokens of the run, the last of which is its latest; before that one, all were forced."""
        return [*(self.of(None, token) for token in tokens[:-1]), bytes(self.latest[4:])] if tokens else []
