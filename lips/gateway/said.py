"""The record of an answer, the same for all interfaces: blocks of text and calls of tools, with their tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import libsym as sym
from lips.gateway.asked import Asked
from lips.gateway.engine import Finish, Piece
from lips.gateway.fields import parse_inner
from lips.gateway.tools import Part, ToolArguments, ToolCall

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class Block:
    """Part of an answer: a text, or a call of a tool."""

    index: int
    call: str | None = None
    """Name of the tool; None: the block is text."""
    text: str = ""
    """The text, or the call's arguments as JSON."""
    status: Status = "in_progress"
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def arguments(self) -> Any:
        """Return the arguments of a call as an object. If the arguments were cut off, the object is empty."""
        try:
            return parse_inner(self.text)
        except ValueError:
            return {}


Change = tuple[Literal["begins", "grows", "ends"], Block, str]
"""An event of a block, with the text by which the block grows."""


class Said:
    """The part of an answer that has been generated so far."""

    def __init__(self, asked: Asked, index: int = 0) -> None:
        self.index = index
        """Index of the answer among all answers to its request."""
        self.blocks: list[Block] = []
        self.tokens: list[int] = []
        self.dists: list[sym.ReducedDist | None] = []
        """Distribution of each token, if the request asks for log-probabilities."""
        self.finish: Finish | None = None
        self.stop_text: str | None = None
        self._parser = asked.choice.parser(is_json=asked.sampling.is_format)
        self._num_taken = 0

    @property
    def text(self) -> str:
        """Return the text of the answer, without calls."""
        return "".join(block.text for block in self.blocks if block.call is None)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.call is not None]

    def hear(self, piece: Piece) -> list[Change]:
        """Add a piece; return the resulting changes."""
        self.tokens += piece.tokens
        self.dists += piece.dists
        return self._changes([piece.text] if self._parser is None else self._parser.add(piece.text))

    def end(self, finish: Finish, stop_text: str | None = None) -> list[Change]:
        """End the answer; return the resulting changes."""
        changes = self._changes(() if self._parser is None else self._parser.end())
        self.finish, self.stop_text = finish, stop_text
        return [*changes, *self.close("incomplete" if finish == "length" else "completed")]

    def close(self, status: Status) -> list[Change]:
        """End the last block if it is open; return the resulting changes."""
        if not self.blocks or self.blocks[-1].status != "in_progress":
            return []
        self.blocks[-1].status = status
        return [("ends", self.blocks[-1], "")]

    def take(self) -> Piece:
        """Return the tokens that no earlier call of this method has returned."""
        first, self._num_taken = self._num_taken, len(self.tokens)
        return Piece("", self.tokens[first:], self.dists[first:])

    def _changes(self, parts: Iterable[Part]) -> list[Change]:
        return [change for part in parts for change in self._change(part)]

    def _change(self, part: Part) -> Iterator[Change]:
        match part:
            case ToolCall(name):
                yield from self._begin(name)
            case ToolArguments(text):
                yield self._grow(text)
            case str() if part:
                if not self.blocks or self.blocks[-1].call is not None:
                    yield from self._begin(None)
                yield self._grow(part)

    def _begin(self, call: str | None) -> Iterator[Change]:
        yield from self.close("completed")
        self.blocks.append(Block(len(self.blocks), call))
        yield "begins", self.blocks[-1], ""

    def _grow(self, text: str) -> Change:
        self.blocks[-1].text += text
        return "grows", self.blocks[-1], text
