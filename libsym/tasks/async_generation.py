"""A generation for event loops: the asynchronous `Generation`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Self

from libsym.calls.generate import Progress, Started, TextPieces, texts_script
from libsym.calls.open_file import OpenFile
from libsym.channel.event_loop import AsyncStream, run
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call
from libsym.errors import SymError


class AsyncGeneration(Progress):
    """A generation under way: `async for token in generation`. Only one task at a time may wait for its tokens.

    A second task gets Invalid. Cancelling a task ends its wait, not the generation. The end of an `async with` block
    ends the generation.

    >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65], max_tokens=3)
    >>> [token async for token in generation], generation.finish
    ([65, 65, 65], 'length')
    """

    def __init__(self, kv: OpenFile, call: Call, state: Started) -> None:
        super().__init__(kv, state)
        self._num_given = 0
        self._failure: SymError | None = None  # an error that ended a cancelled generation; the next `fetch` raises it
        self._stream = AsyncStream(kv.channel, call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        while self._num_given >= len(self._tokens):
            if not await self.fetch():
                raise StopAsyncIteration
        self._num_given += 1
        self.num_read = max(self.num_read, self._num_given)
        return self._tokens[self._num_given - 1]

    async def text(self, *, special: bool = True) -> AsyncIterator[str]:
        """Iterate over the text of all tokens, in whole characters, without the stop text: see `Generation.text`.

        >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65], max_tokens=3)
        >>> "".join([piece async for piece in generation.text()])
        'AAA'
        """
        channel = self._kv.channel
        pieces = TextPieces(await run(channel, texts_script(channel, special=special)), self.stop_texts)
        num_taken = 0
        while True:
            new, num_taken = self._tokens[num_taken:], len(self._tokens)
            if piece := pieces.add(new):
                self._note_read(pieces)
                yield piece
            if num_taken == len(self._tokens) and not await self.fetch():
                break
        piece = pieces.end(self.finish)
        self._note_read(pieces)
        if piece:
            yield piece

    async def feed(
        self, take: Callable[[str], bool], settle: Callable[[], Awaitable[None]], *, special: bool = True
    ) -> None:
        """Call `take` with each piece of the text as it arrives, while this task sleeps; return after the last piece.

        The pieces are those of `text()`. No task switch lies between the arrival of a piece and the call, so many
        streams cost less. If `take` returns False, the task awaits `settle()` before it takes more tokens.

        >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65], max_tokens=3)
        >>> found = []
        >>> async def settle(): raise AssertionError
        >>> await generation.feed(lambda piece: not found.append(piece), settle)
        >>> "".join(found)
        'AAA'
        """
        channel = self._kv.channel
        pieces = TextPieces(await run(channel, texts_script(channel, special=special)), self.stop_texts)
        num_taken, goes_on = 0, True

        def took() -> bool:
            nonlocal num_taken, goes_on
            new, num_taken = self._tokens[num_taken:], len(self._tokens)
            if piece := pieces.add(new):
                self._note_read(pieces)
                goes_on = take(piece)
            return goes_on

        took()
        while True:
            if not goes_on:
                await settle()
                goes_on = True
            if not await self.fetch(took):
                break
        piece = pieces.end(self.finish)
        self._note_read(pieces)
        if piece and not take(piece):
            await settle()

    async def full_text(self) -> str:
        """Wait for the last token and return the whole text.

        >>> kv, grammar = await sym.aio.kv_create(), sym.Grammar.regex("abc")
        >>> await (await sym.aio.generate(kv, [65], grammar=grammar)).full_text()
        'abc'
        """
        return "".join([piece async for piece in self.text()])

    def cancel(self) -> Settling:
        """End the generation within a step. The call returns immediately; await its result to wait for the end.

        After `await generation.cancel()`, `tokens` and `pending` are final. Without the `await`, these two raise
        Invalid until the remaining tokens have been taken.

        >>> generation = await sym.aio.generate(await sym.aio.kv_create(), [65])
        >>> await generation.cancel()
        >>> generation.finish, generation.pending == generation.tokens[-1:]
        ('cancelled', True)
        """
        self._is_cancelled = True
        self._stream.cancel()
        return Settling(self._settle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        """Cancel the generation, and wait for its end unless the task is cancelled, too."""
        settling = self.cancel()
        if kind is None or issubclass(kind, Exception):
            await settling

    async def fetch(self, goes_on: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the next tokens, and for more while `goes_on()`. False: the generation is over, and no more tokens
        arrive.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._stream.is_over:
            await run(self._kv.channel, self.drop_stop())
            return False

        def take(reply: Reply) -> bool:
            self.take(reply)
            return goes_on()

        try:
            await self._stream.each(take)
        except SymError as error:
            if not self._stream.is_over:
                raise
            self._end_by(error)
        return True

    async def _settle(self) -> None:
        """Wait for the end of a cancelled generation. If it ended with an error, the next `fetch` raises the error."""
        try:
            while await self.fetch():
                pass
        except SymError as error:
            if self._stream.is_over:  # else another task waits for tokens, and that task takes the remaining tokens
                self._failure = error.with_traceback(None)


class Settling:
    """Result of `AsyncGeneration.cancel`. Await this object to wait for the end of the generation, which also ends
    without the wait.
    """

    __slots__ = ("_settle",)

    def __init__(self, settle: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._settle = settle

    def __await__(self) -> Generator[Any, Any, None]:
        return self._settle().__await__()
