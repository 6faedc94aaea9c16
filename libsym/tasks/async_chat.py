"""A conversation for event loops: the asynchronous `Chat`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self

from anyio import CancelScope, move_on_after

from libsym.arguments import Path
from libsym.calls.generate import Grammar, Ngram, Options, generate_call
from libsym.channel.event_loop import run
from libsym.errors import SymError
from libsym.rows.sampler import Sampler
from libsym.tasks.async_generation import AsyncGeneration
from libsym.tools.chat import Message, Turns, log

_CLOSING_S = 5.0
"""Longest wait of a cancelled task that closes its conversation. A step or two is enough."""


class AsyncChat(Turns[AsyncGeneration]):
    """A conversation in a KV file, `sym.aio.Chat`: see `libsym.Chat`. Its calls are awaited.

    >>> async with sym.aio.Chat(await sym.aio.kv_create()) as chat:
    ...     answer = await chat.ask("Is it?", grammar=sym.Grammar.regex("yes|no"))
    ...     await answer.full_text() in ("yes", "no")
    True
    """

    async def ask(
        self,
        content: str | Sequence[Message],
        *,
        role: str = "user",
        begin: str = "",
        sampler: Sampler | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: str | int | Iterable[str | int] = (),
        stop_at_end: bool = True,
        keep_stop: bool = False,
        max_tokens: int | None = None,
        grammar: Grammar | None = None,
        draft: Literal["ngram"] | Ngram | None = None,
        logprobs: int | None = None,
        seed: int | None = None,
        before: Iterable[int] | None = None,
        priority: int | None = None,
        deadline: float | None = None,
    ) -> AsyncGeneration:
        """Append a question, and return the answer after its first token has arrived: see `Chat.ask`.

        >>> chat = sym.aio.Chat(await sym.aio.kv_create())
        >>> len([token async for token in await chat.ask("Who?", max_tokens=3)])
        3
        >>> (await sym.aio.Chat(await sym.aio.kv_create(), seed=7).ask("Who?", max_tokens=3)).seed
        7
        """
        await self._cancel()
        tokens = await run(self.kv.channel, self._question(content, role, begin))
        options = Options(
            sampler=sampler,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=stop,
            stop_at_end=stop_at_end,
            keep_stop=keep_stop,
            max_tokens=max_tokens,
            grammar=grammar,
            draft=draft,
            logprobs=logprobs,
            seed=seed,
            first_draw=self._first_draw,
            turn_at=self._turn_at,
            before=None if before is None else [*before, *tokens],
            priority=priority,
            deadline=deadline,
        )
        call, state = generate_call(self.kv, tokens, self._with_settings(options))
        answer = self._answered_by(AsyncGeneration(self.kv, call, state))
        await answer.fetch()
        return answer

    async def undo(self) -> None:
        """Cut off the last turn: see `Chat.undo`.

        >>> chat = sym.aio.Chat(await sym.aio.kv_create())
        >>> answer = await (await chat.ask("Who?", max_tokens=3)).full_text()
        >>> await chat.undo()
        >>> (await sym.aio.kv_stat(chat.kv)).tokens
        0
        """
        await self._cancel()
        await run(self.kv.channel, self._undo())

    async def fork(self, path: Path | None = None) -> AsyncChat:
        """Return a Chat with the same conversation in a fork of the file: see `Chat.fork`.

        >>> chat = sym.aio.Chat(await sym.aio.kv_create(), "You are brief.")
        >>> (await chat.fork("other.kv")).kv.path
        'other.kv'
        """
        return await run(self.kv.channel, self._fork(path))

    async def close(self) -> None:
        """End an answer that is under way, write pending tokens, and close the file: see `Chat.close`.

        >>> chat = sym.aio.Chat(await sym.aio.kv_create())
        >>> await chat.close()
        >>> chat.kv.closed
        True
        """
        await self._cancel()
        await run(self.kv.channel, self._close())

    async def settle(self) -> None:
        """End an answer that is under way, and make `pending` final: see `Chat.settle`.

        >>> chat = sym.aio.Chat(await sym.aio.kv_create())
        >>> answer = await chat.ask("Who?")
        >>> await chat.settle()
        >>> (await sym.aio.kv_stat(chat.kv)).tokens, chat.pending
        (0, [])
        """
        await self._cancel()
        await run(self.kv.channel, self._end_turn())

    async def _cancel(self) -> None:
        if self._answer is not None and self._is_answering and not self.kv.closed:
            await self._answer.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        """Close the file. A cancelled task waits a moment, too, so that pending tokens are written."""
        try:
            with CancelScope(shield=True), move_on_after(_CLOSING_S):
                await self.close()
        except SymError as error:
            if kind is None:
                raise
            if not issubclass(kind, type(error)):  # else the caller already gets an error
                log.warning("%s was not closed in order after %s: %s", self.kv.name, kind.__name__, error)
        finally:
            if not self.kv.closed:
                await self.kv.__aexit__()
