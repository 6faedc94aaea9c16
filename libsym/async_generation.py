"""A generation for event loops: the twin of `Generation`."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from libsym.calls import Call
from libsym.errors import SymError
from libsym.event_loop import AsyncStream, run
from libsym.generate import Progress, Started, TextPieces
from libsym.open_file import OpenFile
from libsym.vocabulary import vocabulary_script


class AsyncGeneration(Progress):
    """A generation under way: `async for token in generation`. One task at a time may wait for its tokens.

    A second one gets Invalid. Cancelling a task ends its wait, not the generation; `async with` does that.

    >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65], max_tokens=3)
    >>> [token async for token in generation], generation.finish
    ([65, 65, 65], 'length')
    """

    def __init__(self, kv: OpenFile, call: Call, state: Started) -> None:
        super().__init__(state.seed, state.stop_texts)
        self._kv = kv
        self._num_given = 0
        self._stream = AsyncStream(kv.channel, call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        while self._num_given >= len(self.tokens):
            if not await self.fetch():
                raise StopAsyncIteration
        self._num_given += 1
        return self.tokens[self._num_given - 1]

    async def text(self) -> AsyncIterator[str]:
        """As `Generation.text`.

        >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65], max_tokens=3)
        >>> "".join([piece async for piece in generation.text()])
        'AAA'
        """
        channel = self._kv.channel
        pieces = TextPieces(await run(channel, vocabulary_script(channel)), self.stop_texts)
        num_taken = 0
        while True:
            new, num_taken = self.tokens[num_taken:], len(self.tokens)
            if piece := pieces.add(new):
                yield piece
            if num_taken == len(self.tokens) and not await self.fetch():
                break
        if piece := pieces.end(self.finish):
            yield piece

    def cancel(self) -> None:
        """As `Generation.cancel`. It waits for nothing.

        >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65])
        >>> generation.cancel()
        >>> tokens = [token async for token in generation]
        >>> generation.finish
        'cancelled'
        """
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.cancel()

    async def fetch(self) -> bool:
        """Wait for more. False: it is over, and there is none."""
        if self._stream.is_over:
            return False
        try:
            self.take(await self._stream.next())
        except SymError as error:
            if error.errno != errno.ECANCELED:
                raise
            self.finish = "cancelled"
        return True
