"""What the control files need from the rest of the house: facts to show, a tokenizer, and a way to prefill.

`ControlFiles` and `Prefill` are satisfied by the scheduler, by structure; `symphony` wires them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.fs import OpenKv
from kvfs.pages.free_list import IntArray
from libsym.errors import SymError


@dataclass(frozen=True, slots=True)
class Process:
    """A connected program, and whose it is."""

    uid: int
    gid: int
    since_ns: int


class Prefill(Protocol):
    """Tokens on their way into one KV file, in batches with everybody else's."""

    @property
    def num_queued(self) -> int:
        """Tokens that were appended here and are not computed yet."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Queue some more."""
        ...

    async def wait(self, num_queued: int) -> None:
        """Return when no more than so many are queued; raise what made it fail."""
        ...

    def stop(self, then: Callable[[], None]) -> None:
        """Forget what is queued; call `then` as soon as no step works on the file."""
        ...


class ControlFiles(Protocol):
    """What `.symphony` shows, and how its text view tokenizes and prefills."""

    def model(self) -> str: ...

    def metrics(self) -> str: ...

    def processes(self) -> Mapping[int, Process]:
        """Every connected program, by process number."""
        ...

    def status(self, pid: int) -> str:
        """What one of them has and does; NotFound when it has gone."""
        ...

    @property
    def token_lengths(self) -> IntArray:
        """Bytes of text that each token of the vocabulary stands for."""
        ...

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens; from any thread."""
        ...

    def num_hidden_bytes(self, first_token: int) -> int:
        """How many bytes of a text's first token are not shown: some families put a space in front of a text."""
        ...

    def tokenize(self, text: str, *, is_whole: bool) -> tuple[list[int], str]:
        """The tokens of a text, and what is left of it: nothing if it is whole; from any thread.

        Of a text that goes on, only the part is tokenized that gives the same tokens whatever follows.
        """
        ...

    def prefill(self, file: OpenKv, pid: int, failed: Callable[[SymError], None]) -> Prefill:
        """Begin to append to a file for process `pid`; `failed` is called at most once, when a batch has failed."""
        ...
