"""What one answer says, for the interfaces that have no more than one: text as it comes, and calls of tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from lips.gateway.engine import Answers
from lips.gateway.tools import Part, ToolParser


async def hear(answers: Answers, parser: ToolParser | None, take: Callable[[Part], Awaitable[None]]) -> None:
    """Tells what the one answer says: text as it comes, and calls."""
    async with aclosing(answers.pieces()) as pieces:
        async for _, piece in pieces:
            if parser is not None:
                for part in parser.end() if piece is None else parser.add(piece.text):
                    await take(part)
            elif piece is not None and piece.text:
                await take(piece.text)
