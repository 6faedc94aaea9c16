"""Protocols by which control files get what they need from other packages: facts to show, a tokenizer, and prefill.

The scheduler has classes that satisfy `ControlFiles` and `Prefill` by structure; `symphony` wires them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.fs import OpenKv
from kvfs.pages.free_list import IntArray
from libsym.errors import SymError


@dataclass(frozen=True, slots=True)
class ConnectedProgram:
    """A connected program, with its owner."""

    uid: int
    gid: int
    since_ns: int


class Prefill(Protocol):
    """A queue of tokens to append to one KV file. Steps compute them in batches with the calls of programs."""

    @property
    def num_queued(self) -> int:
        """Number of tokens that were appended to this queue and are not computed yet."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Queue tokens after all tokens that were queued before."""
        ...

    async def wait(self, num_queued: int) -> None:
        """Wait until at most `num_queued` tokens are queued. If a batch has failed, raise its error."""
        ...

    def stop(self, then: Callable[[], None]) -> None:
        """Drop the queued tokens. Call `then` as soon as no step works on the file for this queue."""
        ...


class ControlFiles(Protocol):
    """The scheduler as the control files see it: facts for `.symphony`, a tokenizer, and prefill for the text view."""

    def models(self) -> Sequence[bytes]:
        """Return the names of the served models, as names of files. The first model is the default."""
        ...

    def model(self, number: int) -> str:
        """Return the facts of a served model, by its place in `models`."""
        ...

    def metrics(self) -> str: ...

    def processes(self) -> Mapping[int, ConnectedProgram]:
        """Every connected program, by process number."""
        ...

    def status(self, pid: int) -> str:
        """Return the text of a program's `status` file, or raise NotFound if the program has ended."""
        ...

    @property
    def token_lengths(self) -> IntArray:
        """Number of bytes of text of each token in the vocabulary."""
        ...

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens. Any thread may call this."""
        ...

    def num_hidden_bytes(self, first_token: int) -> int:
        """Return the number of bytes that a text hides at its beginning. In some families of models, the first token
        begins with a space that is not part of the text.
        """
        ...

    def tokenize(self, text: str, *, is_whole: bool) -> tuple[list[int], str]:
        """Return the tokens of a text, and the rest of the text that is not tokenized yet. Any thread may call this.

        If `is_whole`, the rest is empty. Else more text may follow, and only the part whose tokens further text cannot
        change is tokenized.
        """
        ...

    def prefill(self, file: OpenKv, pid: int, failed: Callable[[SymError], None]) -> Prefill:
        """Return a queue that appends to a file for process `pid`. If a batch fails, `failed` is called once, with the
        error.
        """
        ...
