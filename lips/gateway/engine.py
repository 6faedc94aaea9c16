"""From a prompt to answers, whatever interface it came by: what is known of it is forked, the rest is computed, and the
tokens come as they are drawn.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectSendStream

import libsym as sym
from libsym.aio import AsyncGeneration
from libsym.channel.event_loop import run
from libsym.generate import AskOptions
from lips.gateway.errors import ApiError
from lips.gateway.prompts import Message, Prompts
from lips.gateway.sampling import Sampling
from lips.gateway.tenants import Session, Tenant

log = logging.getLogger(__name__)
Found = TypeVar("Found")
Finish = Literal["stop", "length"]
Charge = Callable[[int], None]
"""Is told of tokens that were computed, whatever comes of them."""
_ROOM_TRIES = 4
_SETTLES_S = 10
"""A cancelled generation ends within a step; this limit is for a daemon that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Prompt and settings of the answers that a request wants."""

    tokens: Sequence[int] = ()
    """The whole prompt."""
    sampling: Sampling
    grammar: sym.Grammar | None = None
    session: Session | None = None
    """The conversation: its file has what was said in the end."""
    base: Session | None = None
    """In place of the session, where the file is that may have a part of the prompt."""
    turn: Sequence[dict[str, Any]] | None = None
    """In place of `tokens`: messages that go on with what the session's file has."""
    tools: Sequence[Any] | None = None
    """Where a turn begins a conversation, it may be told of these."""
    begin: str = ""
    """Text that the answer to a turn begins with."""
    is_format: bool = False
    """The grammar says what the answer is, so that no text in it is a call."""
    deadline_s: float | None = None
    is_streamed: bool = False
    """The client has each piece as it comes; else nothing before the whole answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain, with the tokens that have come since the last piece."""

    text: str
    tokens: Sequence[int] = ()
    dists: Sequence[sym.ReducedDist | None] = ()


@dataclass(slots=True)
class Answer:
    """An answer: number `index` of the n that a request wants."""

    index: int
    generation: AsyncGeneration
    sampling: Sampling
    num_sent: tuple[int, int] = (0, 0)
    """Tokens, and bytes of their text, that were in pieces which were taken."""
    is_full: bool = False
    """The generation ended because room ran out: the text that has come is the answer."""

    async def pieces(self) -> AsyncIterator[Piece]:
        """As they come; in the end every token was in one, but those of a stop text."""
        num_given = 0
        async for text in self._texts():
            given = self.generation.num_read, self.generation.num_read_bytes
            yield self._piece(text, num_given, given[0])
            num_given = given[0]
            self.num_sent = given
        num_read = self.generation.num_read
        text = (self.stop_text or "") if self.sampling.keeps_stop else ""
        if text or num_given < num_read:
            yield self._piece(text, num_given, num_read)

    async def _texts(self) -> AsyncIterator[str]:
        given = ""
        try:
            async for text in self.generation.text(special=self.sampling.shows_special):
                yield text
                given += text
        except (sym.OverQuota, sym.NoSpace):
            if self.generation.is_lost:
                raise
            self.is_full = True
            if rest := (await self.generation.full_text())[len(given) :]:
                yield rest

    def _piece(self, text: str, num_given: int, end: int) -> Piece:
        generation = self.generation
        tokens, dists = generation.came(num_given, end)
        return Piece(text, tokens, () if self.sampling.logprobs is None else dists)

    def was_sent(self, *, is_streamed: bool) -> None:
        """Count the sent tokens alone as read: the answer broke off."""
        self.generation.num_read, self.generation.num_read_bytes = self.num_sent if is_streamed else (0, 0)

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended it."""
        stopped_by = self.generation.stopped_by
        return stopped_by if isinstance(stopped_by, str) else None

    @property
    def finish(self) -> Finish:
        return "length" if self.is_full or self.generation.finish in {"length", "deadline"} else "stop"


@dataclass(slots=True)
class Answers:
    """Answers to one request, with the numbers of tokens in its prompt."""

    answers: list[Answer]
    num_prompt: int
    num_cached: int

    @property
    def num_completion(self) -> int:
        return sum(len(each.generation.tokens) for each in self.answers)

    @property
    def num_cancelled(self) -> int:
        """Generations that were ended before their end."""
        return sum(each.generation.finish == "cancelled" for each in self.answers)

    async def pieces(self) -> AsyncGenerator[tuple[Answer, Piece | None], None]:
        """Of all answers, as they come; None is an answer's end."""
        if len(self.answers) == 1:
            async for piece in self.answers[0].pieces():
                yield self.answers[0], piece
            yield self.answers[0], None
            return
        send, receive = anyio.create_memory_object_stream[tuple[Answer, Piece | None]]()

        async def forward(answer: Answer, to: MemoryObjectSendStream[tuple[Answer, Piece | None]]) -> None:
            async with to:
                async for piece in answer.pieces():
                    await to.send((answer, piece))
                await to.send((answer, None))

        async with anyio.create_task_group() as tasks:
            for each in self.answers:
                tasks.start_soon(forward, each, send.clone())
            send.close()
            async with receive:
                async for found in receive:
                    yield found


@asynccontextmanager
async def answered(tenant: Tenant, wanted: Wanted, prompts: Prompts, charge: Charge) -> AsyncIterator[Answers]:
    """Answers to what is wanted, from the first token on. `charge` is told of the prompt's tokens.

    Behind the block they are cancelled where they have not ended, and what was computed is kept for the next prompt.
    """
    computing = _computing(tenant, wanted, charge) if wanted.turn is None else _talking(tenant, wanted, prompts, charge)
    async with computing as answers:
        if all(each.generation.finish == "deadline" and not each.generation.tokens for each in answers.answers):
            raise ApiError(503, f"the answer did not begin within {wanted.deadline_s:g} s", retry_after_s=1)
        yield answers


@asynccontextmanager
async def _computing(tenant: Tenant, wanted: Wanted, charge: Charge) -> AsyncIterator[Answers]:
    """A whole prompt: what is known of its beginning is not computed again."""
    tokens, cache = list(wanted.tokens), tenant.cache
    async with cache.place(tokens, await _known_file(wanted.base or wanted.session)) as (kv, num_cached):
        generations = await _begin(tenant, kv, tokens, num_cached, wanted, charge)
        if len(generations) > 1:
            cache.keep(kv, tokens[:-1])
            entry = None
        else:
            entry = cache.keep(kv, tokens, is_growing=True)
    answers, is_whole = _listed(generations, wanted.sampling), False
    try:
        yield Answers(answers, len(tokens), num_cached)
        is_whole = True
    finally:
        with anyio.CancelScope(shield=True):
            await _settle(generations)
            first = generations[0]
            if not is_whole:
                answers[0].was_sent(is_streamed=wanted.is_streamed)
            if wanted.session is not None and (is_whole or first.is_read) and not first.kv.closed:
                assert isinstance(first.kv, sym.KV)
                length, pending = None, first.pending
                if not is_whole:
                    length, pending = await run(first.kv.channel, first.read_part())
                # First: the cache may have no room for it.
                await _save(tenant, wanted.session, first.kv, length, pending)
            if entry is not None and not kv.closed:
                whole = tokens + first.tokens
                cache.grown(entry, whole[: first.num_entries or len(tokens)])


async def _known_file(session: Session | None) -> sym.KV | None:
    """A fork of the file, if there is one: the name stays with what was said before, until there is more."""
    if session is None:
        return None
    try:
        return await sym.aio.kv_fork(session.path)
    except sym.NotFound:
        return None


async def _begin(
    tenant: Tenant, kv: sym.KV, tokens: list[int], num_cached: int, wanted: Wanted, charge: Charge
) -> list[AsyncGeneration]:
    """The generations, when each has its first token."""
    options: AskOptions = {**_options(wanted), "before": tokens}
    is_again = False

    async def begin() -> list[AsyncGeneration]:
        nonlocal is_again
        if is_again:  # the first try has computed some of it
            await sym.aio.kv_truncate(kv, num_cached)
        is_again = True
        async with _charged(charge, kv, num_cached, lambda: len(tokens) - num_cached):
            if wanted.sampling.n > 1:
                return await sym.aio.generate_n(kv, tokens[num_cached:], wanted.sampling.n, **options)
            return [await sym.aio.generate(kv, tokens[num_cached:], **options)]

    return await _with_room(tenant, begin)


async def _with_room(tenant: Tenant, begin: Callable[[], Awaitable[Found]]) -> Found:
    """Return what `begin` gives. Where there is no room for it, the files that were not used for longest go."""
    for _ in range(_ROOM_TRIES):
        try:
            return await begin()
        except sym.OverQuota:
            if not tenant.cache.shrink(tenant.cache.num_tokens // 2):
                raise
        except sym.NoSpace:
            if not tenant.make_room():
                raise
    raise ApiError(503, "there is no room for this prompt now: try again", retry_after_s=1)


@asynccontextmanager
async def _charged(charge: Charge, kv: sym.KV, num_before: int, num_given: Callable[[], int]) -> AsyncIterator[None]:
    """Charge for tokens that a call in the block was given; where the daemon refuses it, for those that the file has.

    A call that its client drops is charged whole: how much of it was computed, nobody knows before its step has ended.
    """
    try:
        yield
    except sym.SymError:
        charge(max(0, (await sym.aio.kv_stat(kv)).tokens - num_before))
        raise
    except BaseException:
        charge(num_given())
        raise
    charge(num_given())


def _options(wanted: Wanted) -> AskOptions:
    sampling = wanted.sampling
    return {
        "sampler": sampling.sampler,
        "stop": (*sampling.stop, *sampling.stop_tokens),
        "stop_at_end": sampling.stop_at_end,
        "keep_stop": sampling.keeps_stop,
        "max_tokens": sampling.max_tokens,
        "grammar": wanted.grammar,
        "logprobs": sampling.logprobs,
        "seed": sampling.seed,
        "deadline": wanted.deadline_s,
    }


@asynccontextmanager
async def _talking(tenant: Tenant, wanted: Wanted, prompts: Prompts, charge: Charge) -> AsyncIterator[Answers]:
    """A turn of a conversation that its file holds; the file has all of it in the end, the answer's last token, too.

    A turn that breaks off leaves what its client was sent: pieces of a stream, or nothing, not even the question.
    """
    assert wanted.turn is not None
    assert wanted.session is not None
    path = wanted.session.path
    async with tenant.answering(path) as (kv, length):
        num_before = length or 0
        if num_before:
            top, turn = [], await _later_turn(kv, wanted.turn, prompts)
        else:
            top = [message for message in wanted.turn if message["role"] == "system"]
            turn = [message for message in wanted.turn if message["role"] != "system"]
            await tenant.tell_name(path, wanted.session)
        chat = sym.aio.Chat(kv, top, wanted.tools)
        options = _options(wanted)
        if wanted.sampling.sampler.looked_at([0]):
            options["before"] = (await sym.aio.kv_read(kv))[0]
        answer = None

        async def ask() -> AsyncGeneration:
            async with _charged(charge, kv, num_before, lambda: len(chat.answer.given) if chat.answer else 0):
                return await chat.ask(turn, begin=wanted.begin, **options)

        try:
            generation = await _with_room(tenant, ask)
            [answer] = _listed([generation], wanted.sampling)
            yield Answers([answer], num_before + len(generation.given), num_before)
            answer = None
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLES_S):
                if answer is not None:
                    await answer.generation.cancel()
                    answer.was_sent(is_streamed=wanted.is_streamed)
                await _end(chat, is_new=length is None)


async def _later_turn(kv: sym.KV, turn: Sequence[Message], prompts: Prompts) -> list[Message]:
    """The messages of a later turn. The system's message of the beginning, said again, changes nothing.

    Another one is a turn of its own where the template writes such turns, and else refused.
    """
    system = [message for message in turn if message["role"] == "system"]
    if not system:
        return list(turn)
    said = await prompts.said(await sym.aio.detokenize((await sym.aio.kv_read(kv))[0]))
    first = [message["content"] for message in said[:1] if message["role"] == "system"]
    if [message["content"] for message in system] == first:
        return [message for message in turn if message["role"] != "system"]
    text = await sym.aio.detokenize(await sym.aio.chat_tokens(turn, after_answer=True))
    if not all(message["content"].strip() in text for message in system):
        raise ApiError(
            400, "this model's template has no message of the system within a conversation", param="messages"
        )
    return list(turn)


async def _end(chat: sym.aio.Chat, *, is_new: bool) -> None:
    """Close the conversation's file. One that has not begun goes, by its handle: the name may be another file's now."""
    await chat.settle()
    if is_new and not chat.pending and not (await sym.aio.kv_stat(chat.kv)).tokens:
        with suppress(sym.NotFound):
            await sym.aio.kv_remove(chat.kv)
    await chat.close()


def _listed(generations: list[AsyncGeneration], sampling: Sampling) -> list[Answer]:
    return [Answer(index, each, sampling) for index, each in enumerate(generations)]


async def _settle(generations: list[AsyncGeneration]) -> None:
    """None of them appends any more."""
    with anyio.move_on_after(_SETTLES_S):
        for each in generations:
            if each.finish is None:
                await each.cancel()


async def _save(tenant: Tenant, session: Session, kv: sym.KV, num_tokens: int | None, pending: list[int]) -> None:
    """Make the file at the path this one's fork, cut to so many tokens, with those that are pending, at once.

    Nobody sees half of it. A conversation that is being answered keeps its file. The client has its answer all the
    same; with its next request it says the whole again.
    """
    path = session.path
    directory, _, name = path.rpartition("/")
    new = f"{directory}/.{name}.{secrets.token_hex(4)}.new"
    try:
        fork = await sym.aio.kv_fork(kv, new)
        try:
            if num_tokens is not None and (await sym.aio.kv_stat(fork)).tokens > num_tokens:
                await sym.aio.kv_truncate(fork, num_tokens)
            if pending:
                with suppress(sym.Invalid, sym.OverQuota, sym.NoSpace):  # no room: the client says them again
                    await sym.aio.kv_write(fork, pending)
            await tenant.tell_name(new, session)
            async with tenant.saving, tenant.talking(path, may_begin=True) as (old, length):
                try:
                    await sym.aio.kv_rename(new, path)
                except BaseException:
                    if length is None:
                        await sym.aio.kv_remove(old)
                    raise
        except BaseException:
            await sym.aio.kv_remove(fork)
            raise
        await sym.aio.kv_close(fork)
    except (sym.SymError, ApiError, OSError) as error:
        log.warning("%s does not have the last answer: %s", path, error)
