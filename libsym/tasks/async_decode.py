"""The loop of `decode` for event loops: the asynchronous `Decoding`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Self

from libsym.channel.event_loop import run
from libsym.tools.decode import Loop


class AsyncDecoding(Loop):
    """A loop of `sym.aio.decode`: `async for token in decoding`. Only one task at a time may use it.

    >>> decoding = await sym.aio.decode(await sym.aio.kv_create(), [65], sym.Dist.argmax, max_tokens=3)
    >>> [token async for token in decoding], decoding.finish
    ([65, 65, 65], 'length')
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        if self._num_given == len(self.tokens) and not await self._advance():
            raise StopAsyncIteration
        self._num_given += 1
        return self.tokens[self._num_given - 1]

    async def text(self) -> AsyncIterator[str]:
        """Iterate over the text of all tokens, in whole characters, without the stop text: see `Decoding.text`.

        >>> decoding = await sym.aio.decode(await sym.aio.kv_create(), [65], sym.Dist.argmax, max_tokens=3)
        >>> [piece async for piece in decoding.text()]
        ['A', 'A', 'A']
        """
        pieces, num_taken = self._pieces(), 0
        while num_taken < len(self.tokens) or await self._advance():
            new, num_taken = self.tokens[num_taken:], len(self.tokens)
            if piece := pieces.add(new):
                yield piece
        if piece := pieces.end(self.finish):
            yield piece

    async def full_text(self) -> str:
        """Draw all tokens and return the whole text.

        >>> kv = await sym.aio.kv_create()
        >>> await (await sym.aio.decode(kv, [65], sym.Dist.argmax, max_tokens=3)).full_text()
        'AAA'
        """
        return "".join([piece async for piece in self.text()])

    async def _advance(self) -> bool:
        state = self._state
        if state.finish is not None:
            return False
        drawn: Any = state.draw(*await run(state.channel, state.step()))
        return await run(state.channel, state.take(await drawn if isinstance(drawn, Awaitable) else drawn))
