"""Checks of the tokens that a call appends, against its handle and the model's limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.errors import Invalid, NoAccess
from libsym.rows.stops import TokenTexts
from scheduler.connection.lip import Lip
from scheduler.wire.payloads import PayloadReader, check_range


class ModelLimits(Protocol):
    """Limits of the model, and the texts of its tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def token_texts(self) -> Sequence[bytes]: ...


class Limited:
    """Checks of the tokens and positions of calls, against the model's limits."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Return the texts of the tokens. The first access makes the texts, in some milliseconds."""
        return TokenTexts(self._limits.token_texts)

    def entries(self, fields: PayloadReader, num_tokens: int, num_positions: int) -> tuple[IntArray, IntArray | None]:
        """Return the checked tokens of a call, and their positions. A call gives no position, the first position, or
        all positions.

        None: the call gives no position.
        """
        if num_tokens < 1:
            raise Invalid("at least one token is needed: there is nothing to append")
        if num_positions not in (0, 1, num_tokens):
            raise Invalid(f"{num_tokens} tokens need {num_tokens} positions (or only the first), not {num_positions}")
        if num_positions == 0 and num_tokens > self._limits.max_positions:
            raise Invalid(
                f"{num_tokens} tokens end beyond the model's context of {self._limits.max_positions}, also in an empty "
                "file: use fewer, or go through them piece by piece (as the program mapreduce does)"
            )
        tokens = fields.int32(num_tokens, "tokens")
        check_range("token", tokens, self._limits.vocab_size, "the vocabulary")
        if num_positions == 0:
            return tokens, None
        positions = fields.int32(num_positions, "positions").astype(np.int64)
        if num_positions == 1:
            positions = positions[0] + np.arange(num_tokens)  # may exceed 32 bits
        check_range("position", positions, self._limits.max_positions, "the model's context")
        return tokens, positions.astype(np.int32)


def appendable(lip: Lip, handle: int) -> OpenKv:
    file = lip.file(handle)
    if not file.writable:
        raise NoAccess("the file is open for reading only: open it with flags 'rw', or fork it")
    return file
