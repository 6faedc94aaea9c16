"""Engine: answers the prompts of all interfaces.

The engine forks the known prefix of a prompt, computes the rest, and forwards tokens as they are drawn.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import anyio

import libsym as sym
from libsym.aio import AsyncGeneration
from libsym.calls.generate import AskOptions
from libsym.channel.event_loop import run
from lips.gateway.asked import Asked
from lips.gateway.errors import ApiError
from lips.gateway.prompts import ChatMessage, Prompts
from lips.gateway.sampling import Sampling
from lips.gateway.tenants import Session, Tenant
from lips.gateway.usage import Usage

log = logging.getLogger(__name__)
Found = TypeVar("Found")
Finish = Literal["stop", "length"]
Charge = Callable[[int], None]
"""Function that charges computed tokens to the tenant, even if the request fails later."""
_ROOM_TRIES = 4
_SETTLES_S = 10
"""Time limit of a cancellation. A cancelled generation ends within a step, unless the daemon hangs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Final text of a part of an answer, with the tokens since the previous piece."""

    text: str
    tokens: Sequence[int] = ()
    dists: Sequence[sym.ReducedDist | None] = ()


Hear = Callable[["Answer", Piece | None], bool]
"""Function that gets a piece of an answer, or None at the end of the answer. False: await `Settle` before the next."""
Settle = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Answer:
    """The answer with the given index, among the n answers that a request asks for."""

    index: int
    generation: AsyncGeneration
    sampling: Sampling
    num_given: tuple[int, int] = (0, 0)
    """Number of tokens, and number of bytes of their text, in the pieces that the consumer has got."""
    num_sent: tuple[int, int] = (0, 0)
    """The same of the pieces that the consumer has sent."""
    is_full: bool = False
    """Whether the generation ended for lack of room. The text so far is then the answer."""

    async def feed(self, hear: Hear, settle: Settle) -> None:
        """Call `hear` with pieces as tokens arrive. Tokens of a stop text are in no piece; each other token is in one.

        The last call has None instead of a piece.
        """
        generation, num_chars = self.generation, 0

        def take(text: str) -> bool:
            nonlocal num_chars
            num_chars += len(text)
            (start, _), self.num_given = self.num_given, (generation.num_read, generation.num_read_bytes)
            tokens, dists = generation.came(start, self.num_given[0])
            is_sent = hear(self, Piece(text, tokens, () if self.sampling.logprobs is None else dists))
            if is_sent:
                self.num_sent = self.num_given
            return is_sent

        async def settled() -> None:
            await settle()
            self.num_sent = self.num_given

        rest = ""
        try:
            await generation.feed(take, settled, special=self.sampling.shows_special)
        except (sym.OverQuota, sym.NoSpace):
            if generation.is_lost:
                raise
            self.is_full = True
            rest = (await generation.full_text())[num_chars:]
        if self.sampling.keeps_stop:
            rest += self.stop_text or ""
        if (rest or self.num_given[0] < generation.num_read) and not take(rest):
            await settled()
        if not hear(self, None):
            await settle()

    def was_sent(self, *, is_streamed: bool) -> None:
        """Count only the sent tokens as read, since the answer broke off."""
        self.generation.num_read, self.generation.num_read_bytes = self.num_sent if is_streamed else (0, 0)

    @property
    def stop_text(self) -> str | None:
        """Return the stop text that ended the answer, if a stop text did."""
        stopped_by = self.generation.stopped_by
        return stopped_by if isinstance(stopped_by, str) else None

    @property
    def finish(self) -> Finish:
        return "length" if self.is_full or self.generation.finish in {"length", "deadline"} else "stop"


@dataclass(slots=True)
class Answers:
    """The answers to one request, with the number of tokens in its prompt and how many of these were cached."""

    answers: list[Answer]
    num_prompt: int
    num_cached: int

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_cached, sum(len(each.generation.tokens) for each in self.answers))

    @property
    def num_cancelled(self) -> int:
        """Return the number of cancelled generations."""
        return sum(each.generation.finish == "cancelled" for each in self.answers)

    async def feed(self, hear: Hear, settle: Settle) -> None:
        """Call `hear` with the pieces of all answers as they arrive."""
        if len(self.answers) == 1:
            await self.answers[0].feed(hear, settle)
            return
        async with anyio.create_task_group() as tasks:
            for each in self.answers:
                tasks.start_soon(each.feed, hear, settle)


@asynccontextmanager
async def answered(tenant: Tenant, asked: Asked, prompts: Prompts, charge: Charge) -> AsyncIterator[Answers]:
    """Yield the answers to a request once they have begun. `charge` gets the number of computed prompt tokens.

    After the block unfinished answers are cancelled, and the computed KV is kept for later prompts.
    """
    is_turn = asked.prompt.turn is not None
    computing = _talking(tenant, asked, prompts, charge) if is_turn else _computing(tenant, asked, charge)
    async with computing as answers:
        if all(each.generation.finish == "deadline" and not each.generation.tokens for each in answers.answers):
            raise ApiError(503, f"the answer did not begin within {asked.deadline_s:g} s", retry_after_s=1)
        yield answers


@asynccontextmanager
async def _computing(tenant: Tenant, asked: Asked, charge: Charge) -> AsyncIterator[Answers]:
    """Answer a whole prompt; its known prefix is not computed again."""
    tokens, cache = list(asked.prompt.tokens), tenant.cache
    async with cache.place(tokens, await _known_file(asked.base or asked.session)) as (kv, num_cached):
        generations = await _begin(tenant, kv, tokens, num_cached, asked, charge)
        if len(generations) > 1:
            cache.keep(kv, tokens[:-1])
            entry = None
        else:
            entry = cache.keep(kv, tokens, is_growing=True)
    answers, is_whole = _listed(generations, asked.sampling), False
    try:
        yield Answers(answers, len(tokens), num_cached)
        is_whole = True
    finally:
        with anyio.CancelScope(shield=True):
            await _settle(generations)
            first = generations[0]
            if not is_whole:
                answers[0].was_sent(is_streamed=asked.is_streamed)
            if asked.session is not None and (is_whole or first.is_read) and not first.kv.closed:
                assert isinstance(first.kv, sym.KV)
                length, pending = None, first.pending
                if not is_whole:
                    length, pending = await run(first.kv.channel, first.read_part())
                # Before `grown`: the cache may close the file for lack of room.
                await _save(tenant, asked.session, first.kv, length, pending)
            if entry is not None and not kv.closed:
                whole = tokens + first.tokens
                cache.grown(entry, whole[: first.num_entries or len(tokens)])


async def _known_file(session: Session | None) -> sym.KV | None:
    """Return a fork of the session's file, if it exists. The session's path names the old file until a longer file
    is saved there.
    """
    if session is None:
        return None
    try:
        return await sym.aio.kv_fork(session.path)
    except sym.NotFound:
        return None


async def _begin(
    tenant: Tenant, kv: sym.KV, tokens: list[int], num_cached: int, asked: Asked, charge: Charge
) -> list[AsyncGeneration]:
    """Start the generations; return them when each has its first token."""
    options: AskOptions = {**_options(asked), "before": tokens}
    is_again = False

    async def begin() -> list[AsyncGeneration]:
        nonlocal is_again
        if is_again:  # the first try may have computed some tokens
            await sym.aio.kv_truncate(kv, num_cached)
        is_again = True
        async with _charged(charge, kv, num_cached, lambda: len(tokens) - num_cached):
            if asked.sampling.n > 1:
                return await sym.aio.generate_n(kv, tokens[num_cached:], asked.sampling.n, **options)
            return [await sym.aio.generate(kv, tokens[num_cached:], **options)]

    return await _with_room(tenant, begin)


async def _with_room(tenant: Tenant, begin: Callable[[], Awaitable[Found]]) -> Found:
    """Return the result of `begin`. If memory or quota is full, drop the least recently used files and try again."""
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
    """Charge for the tokens of the call in the block. If the daemon refuses the call, charge for the appended tokens.

    A cancelled call is charged in full: the computed part is unknown before its step has ended.
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


def _options(asked: Asked) -> AskOptions:
    sampling = asked.sampling
    return {
        "sampler": sampling.sampler,
        "stop": (*sampling.stop, *sampling.stop_tokens),
        "stop_at_end": sampling.stop_at_end,
        "keep_stop": sampling.keeps_stop,
        "max_tokens": sampling.max_tokens,
        "grammar": sampling.grammar,
        "logprobs": sampling.logprobs,
        "seed": sampling.seed,
        "deadline": asked.deadline_s,
    }


@asynccontextmanager
async def _talking(tenant: Tenant, asked: Asked, prompts: Prompts, charge: Charge) -> AsyncIterator[Answers]:
    """Answer a turn of a conversation in its file. At the end, the file has the whole turn, up to the last token.

    A turn that breaks off leaves only the part that its client has received: pieces of a stream, or nothing.
    """
    assert asked.prompt.turn is not None
    assert asked.session is not None
    path = asked.session.path
    async with tenant.answering(path) as (kv, length):
        num_before = length or 0
        if num_before:
            top, turn = [], await _later_turn(kv, asked.prompt.turn, prompts)
        else:
            top = [message for message in asked.prompt.turn if message["role"] == "system"]
            turn = [message for message in asked.prompt.turn if message["role"] != "system"]
            await tenant.tell_name(path, asked.session)
        chat = sym.aio.Chat(kv, top, asked.prompt.tools)
        options = _options(asked)
        if asked.sampling.sampler.looked_at([0]):
            options["before"] = (await sym.aio.kv_read(kv))[0]
        answer = None

        async def ask() -> AsyncGeneration:
            async with _charged(charge, kv, num_before, lambda: len(chat.answer.given) if chat.answer else 0):
                return await chat.ask(turn, begin=asked.prompt.begin, **options)

        try:
            generation = await _with_room(tenant, ask)
            [answer] = _listed([generation], asked.sampling)
            yield Answers([answer], num_before + len(generation.given), num_before)
            answer = None
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLES_S):
                if answer is not None:
                    await answer.generation.cancel()
                    answer.was_sent(is_streamed=asked.is_streamed)
                await _end(chat, is_new=length is None)


async def _later_turn(kv: sym.KV, turn: Sequence[ChatMessage], prompts: Prompts) -> list[ChatMessage]:
    """Return the messages of a later turn, without a system message that repeats the first one.

    A different system message stays if the template can write it within a conversation. Else ApiError 400.
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
    """Close the conversation's file. Remove a new file without tokens by handle: its name may denote another file."""
    await chat.settle()
    if is_new and not chat.pending and not (await sym.aio.kv_stat(chat.kv)).tokens:
        with suppress(sym.NotFound):
            await sym.aio.kv_remove(chat.kv)
    await chat.close()


def _listed(generations: list[AsyncGeneration], sampling: Sampling) -> list[Answer]:
    return [Answer(index, each, sampling) for index, each in enumerate(generations)]


async def _settle(generations: list[AsyncGeneration]) -> None:
    """Cancel the unfinished generations, so that they append no more tokens."""
    with anyio.move_on_after(_SETTLES_S):
        for each in generations:
            if each.finish is None:
                await each.cancel()


async def _save(tenant: Tenant, session: Session, kv: sym.KV, num_tokens: int | None, pending: list[int]) -> None:
    """Replace the session's file atomically by a fork of `kv`, cut to `num_tokens`, with the pending tokens appended.

    A conversation with a turn in flight keeps its file. A failure is logged: the client has its answer, and its next
    request sends the whole conversation again.
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
                with suppress(sym.Invalid, sym.OverQuota, sym.NoSpace):  # no room: the client sends these tokens again
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
