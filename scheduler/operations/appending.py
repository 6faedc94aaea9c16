"""Checks of what a call appends, against its handle and the model's limits."""

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
from scheduler.payloads import Fields, check_range


class Limits(Protocol):
    """Limits of the model, and the texts of its tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def token_texts(self) -> Sequence[bytes]: ...


class Limited:
    """Checks of calls that append, against the model's limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Made with the first call that draws or stops at a text: it takes some milliseconds."""
        return TokenTexts(self._limits.token_texts)

    def entries(self, fields: Fields, num_tokens: int, num_positions: int) -> tuple[IntArray, IntArray | None]:
        """The tokens of a call, and their positions if it has any: none, the first, or all."""
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
            positions = positions[0] + np.arange(num_tokens)  # may go beyond 32 bits
        check_range("position", positions, self._limits.max_positions, "the model's context")
        return tokens, positions.astype(np.int32)


def appendable(lip: Lip, handle: int) -> OpenKv:
    file = lip.file(handle)
    if not file.writable:
        raise NoAccess("the file is open for reading only: open it with flags 'rw', or fork it")
    return file
