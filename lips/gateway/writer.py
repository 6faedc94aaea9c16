"""Writers of answers. The base class receives pieces from the engine; each interface formats them as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import anyio

from lips.gateway.asgi import EVENTS, Outlet, Streamed, Whole, Work
from lips.gateway.asked import Asked
from lips.gateway.engine import Answer, Piece
from lips.gateway.errors import ApiError
from lips.gateway.reader import Received
from lips.gateway.said import Change, Said
from lips.gateway.usage import Usage


class Writer(ABC):
    """Writer of the answers to one request. `begin`, `tell` and `end` are called only for a stream."""

    media_type = EVENTS
    """Media type of a stream."""

    def __init__(self, received: Received, asked: Asked) -> None:
        self.gateway = received.gateway
        self.tenant = received.tenant
        self.asked = asked
        self.said = [Said(asked, index) for index in range(asked.sampling.n)]
        self.usage = Usage()
        self.given: Sequence[int] = ()
        """Tokens of the prompt, or of the turn in a stored conversation."""
        self.outlet: Outlet | None = None
        """The body of a stream; None: the answer is sent as a whole."""

    def work(self) -> Work:
        if self.asked.is_streamed:
            return Streamed(self._stream, self.failed, self.media_type)
        return Whole(self._whole)

    async def _stream(self, outlet: Outlet) -> None:
        self.outlet = outlet
        await self.answer()
        await self.end()

    def put(self, part: bytes) -> None:
        """Send a part of a stream."""
        assert self.outlet is not None
        self.outlet.put(part)

    async def _whole(self) -> dict[str, Any]:
        await self.answer()
        return await self.whole()

    async def answer(self) -> None:
        """Receive the answers. Afterwards the file of a conversation has all of them."""
        await self.hear(self.asked, self.said)

    async def hear(self, asked: Asked, said: Sequence[Said]) -> None:
        async with self.gateway.answered(self.tenant, asked) as answers:
            self.given = asked.prompt.tokens or answers.answers[0].generation.given
            self.usage.num_prompt += answers.num_prompt
            self.usage.num_cached += answers.num_cached
            outlet = self.outlet

            def heard(answer: Answer, piece: Piece | None) -> bool:
                one = said[answer.index]
                changes = one.end(answer.finish, answer.stop_text) if piece is None else one.hear(piece)
                if outlet is None:
                    return True
                self.tell(one, changes)
                return not outlet.is_waiting

            try:
                if outlet is not None:
                    self.begin()
                    await outlet.flush()
                await answers.feed(heard, outlet.flush if outlet is not None else anyio.lowlevel.checkpoint)
            finally:
                self.usage.num_completion += answers.usage.num_completion

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the event that reports an error after the first event."""

    def begin(self) -> None:  # noqa: B027 - the default sends nothing
        """Put the events before the first piece."""

    @abstractmethod
    def tell(self, said: Said, changes: Sequence[Change]) -> None:
        """Put the changes from a piece, or from the end of an answer."""

    async def end(self) -> None:  # noqa: B027
        """Put the events after all answers."""

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
