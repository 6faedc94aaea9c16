"""The system calls as coroutines, for programs that use trio or asyncio (through anyio).

    >>> import libsym as sym
    >>> async def answer(question: str) -> str:
    ...     async with await sym.aio.kv_create() as kv:
    ...         dist = await sym.aio.pred(kv, await sym.aio.tokenize(question))
    ...         return await sym.aio.detokenize([dist.argmax()])
    >>> await answer("Why?")  # at the prompt of `python -m asyncio`; in a program: anyio.run(answer, "Why?")
    '?'

Names, arguments, errors and help() are the same as in `libsym`. In the examples, read `await sym.aio.` for `sym.`.
A thousand tasks may call at once, and threads of the same program may call, too. Cancelling a task cancels its call at
the daemon: a `pred` that has not begun appends nothing, and a `recv` leaves its message in the queue.

`KV` and `Dist` objects are the same as in `libsym`. Methods of `KV` that call the daemon block the event loop; the
functions here do not. `async with` closes a file, or releases a lock, without waiting.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

from anyio import create_task_group, sleep, to_thread, wait_readable
from anyio.lowlevel import checkpoint

from libsym.arguments import Path, int32
from libsym.calls import advice, changes, children, computed, messages, names, pressure, status, sync, text, usage, user
from libsym.calls import kv as files
from libsym.calls.faces import check_file, first_argument, script_of
from libsym.calls.generate import Grammar, Ngram, Options, generate_call
from libsym.calls.kv import KV, Flags
from libsym.calls.open_file import OpenFile, channel_of
from libsym.calls.pred import (
    CallOptions,
    Mask,
    Positions,
    Pred,
    RowOptions,
    Rows,
    batch_channel,
    batch_of,
    batch_script,
    pred_script,
    write_script,
)
from libsym.calls.several import forked
from libsym.calls.text import TextWindow
from libsym.calls.vocabulary import token_set_script
from libsym.channel import process as connections
from libsym.channel.client import ClientChannel
from libsym.channel.event_loop import run
from libsym.channel.process import Connection, process
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import NotConnected, SymError
from libsym.rows.attention import AttentionColumns, AttentionRows
from libsym.rows.dist import Dist
from libsym.rows.reduced import ReducedDist
from libsym.rows.sampler import Sampler
from libsym.rows.token_set import TokenSet
from libsym.tasks.async_chat import AsyncChat as Chat
from libsym.tasks.async_decode import AsyncDecoding
from libsym.tasks.async_generation import AsyncGeneration
from libsym.tasks.async_tree import AsyncTree as Tree
from libsym.tools import scoring
from libsym.tools.decode import Beside, Decoded, Draw

P = ParamSpec("P")
T = TypeVar("T")
Owner = computed.Owner
Compute = Iterable[int] | Callable[[KV], object]
"""Content of a new file: its tokens, or a function that fills it, perhaps a coroutine function."""

__all__ = [
    "AsyncDecoding",
    "AsyncGeneration",
    "Chat",
    "Detokenizer",
    "Tree",
    "chat_template",
    "chat_tokens",
    "close",
    "connect",
    "connection",
    "daemon_check",
    "daemon_stat",
    "decode",
    "detokenize",
    "fleet_machines",
    "fleet_place",
    "generate",
    "generate_n",
    "getpid",
    "getrusage",
    "kill",
    "kv_advise",
    "kv_changes",
    "kv_chmod",
    "kv_close",
    "kv_create",
    "kv_du",
    "kv_extract",
    "kv_fetch",
    "kv_fork",
    "kv_fork_n",
    "kv_hot",
    "kv_keep",
    "kv_list",
    "kv_lock",
    "kv_merge",
    "kv_mkdir",
    "kv_open",
    "kv_open_or_compute",
    "kv_pressure",
    "kv_read",
    "kv_remove",
    "kv_rename",
    "kv_rewind",
    "kv_stat",
    "kv_sync",
    "kv_truncate",
    "kv_unlock",
    "kv_write",
    "model_info",
    "pred",
    "pred_batch",
    "programs",
    "recv",
    "recv_from_user",
    "score",
    "send",
    "send_to_user",
    "spawn",
    "subscribe",
    "token_set",
    "tokenize",
    "unsubscribe",
    "vocabulary",
    "wait",
]


async def connected() -> ClientChannel:
    """Return the connection of this process. The first call makes the connection in a worker thread."""
    found = process.connected
    return found if found is not None else await to_thread.run_sync(process.channel)


def coroutine(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function for a system call: a task waits in place of the thread."""
    script = script_of(call)

    @wraps(call)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        steps = script(*args, **kwargs)
        file = first_argument(args, kwargs)
        if isinstance(file, OpenFile):
            return await run(file.channel, steps)
        check_file(call, file)
        return await run(await connected(), steps)

    awaited.__module__ = __name__
    return awaited


model_info = coroutine(status.model_info)
daemon_stat = coroutine(status.daemon_stat)
daemon_check = coroutine(status.daemon_check)
fleet_machines = coroutine(status.fleet_machines)
fleet_place = coroutine(status.fleet_place)

kv_create = coroutine(files.kv_create)
kv_open = coroutine(files.kv_open)
kv_close = coroutine(files.kv_close)
kv_fetch = coroutine(files.kv_fetch)
kv_fork = coroutine(files.kv_fork)
kv_fork_n = coroutine(files.kv_fork_n)
kv_extract = coroutine(files.kv_extract)
kv_keep = coroutine(files.kv_keep)
kv_merge = coroutine(files.kv_merge)
kv_lock = coroutine(files.kv_lock)
kv_unlock = coroutine(files.kv_unlock)
kv_remove = coroutine(files.kv_remove)
kv_read = coroutine(files.kv_read)
kv_rewind = coroutine(files.kv_rewind)
kv_truncate = coroutine(files.kv_truncate)
kv_stat = coroutine(files.kv_stat)
kv_list = coroutine(names.kv_list)
kv_mkdir = coroutine(names.kv_mkdir)
kv_rename = coroutine(names.kv_rename)
kv_chmod = coroutine(names.kv_chmod)
kv_du = coroutine(names.kv_du)
kv_hot = coroutine(names.kv_hot)
kv_changes = coroutine(changes.kv_changes)
kv_advise = coroutine(advice.kv_advise)
kv_sync = coroutine(sync.kv_sync)
kv_pressure = coroutine(pressure.kv_pressure)

score = coroutine(scoring.score)

tokenize = coroutine(text.tokenize)
detokenize = coroutine(text.detokenize)
chat_template = coroutine(text.chat_template)
chat_tokens = coroutine(text.chat_tokens)

send = coroutine(messages.send)
recv = coroutine(messages.recv)
subscribe = coroutine(messages.subscribe)
unsubscribe = coroutine(messages.unsubscribe)
getpid = coroutine(usage.getpid)
getrusage = coroutine(usage.getrusage)
spawn = coroutine(children.spawn)
wait = coroutine(children.wait)
kill = coroutine(children.kill)
programs = coroutine(children.programs)


async def connect(
    socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None, wait: float | None = None
) -> None:
    """Connect to the daemon, as `libsym.connect` does. The task can be cancelled between two tries."""
    await _try(lambda: connections.connect(socket, domain=domain), wait)


async def connection(
    socket: str | os.PathLike[str] | None = None,
    *,
    domain: Path | None = None,
    model: str | None = None,
    wait: float | None = None,
) -> Connection:
    """Return a new connection, as `libsym.connection` does. The task can be cancelled between two tries.

    >>> with await sym.aio.connection():
    ...     kv = await sym.aio.kv_create("a.kv")
    >>> (await sym.aio.kv_list())[0].name
    'a.kv'
    """
    return await _try(lambda: connections.connection(socket, domain=domain, model=model), wait)


async def _try(connect: Callable[[], T], wait: float | None) -> T:
    again = connections.pauses(wait)
    while True:
        try:
            return await to_thread.run_sync(connect)
        except NotConnected:
            pause_s = next(again, None)
            if pause_s is None:
                raise
        await sleep(pause_s)


async def close() -> None:
    """Close the connection of this process, as `libsym.close` does.

    >>> await sym.aio.close()
    """
    connections.close()


@overload
async def pred(
    kv: OpenFile, tokens: Iterable[int], positions: Positions = None, **options: Unpack[RowOptions]
) -> Dist: ...
@overload
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int],
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> Dist | ReducedDist: ...
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> Dist | ReducedDist:
    """Append `tokens`, run the model, and return the distribution of the next token: see `libsym.pred`.

    >>> kv = await sym.aio.kv_create()
    >>> (await sym.aio.pred(kv, [65, 66])).argmax()
    66
    """
    wanted = Pred(
        kv, tokens, positions, rows, top_k, logprobs, sampler, mask, priority, deadline, attention, by, first_draw
    )
    return await run(channel_of(kv, "pred"), pred_script(wanted))


async def pred_batch(preds: Iterable[Pred]) -> list[Dist | ReducedDist]:
    """Make many `pred` calls in one message: see `libsym.pred_batch`.

    >>> kvs = [await sym.aio.kv_create() for _ in range(2)]
    >>> dists = await sym.aio.pred_batch([sym.Pred(kv, [65]) for kv in kvs])
    >>> [dist.argmax() for dist in dists]
    [65, 65]
    """
    calls = batch_of(preds)
    return await run(batch_channel(calls), batch_script(calls))


async def generate(
    kv: OpenFile,
    tokens: Iterable[int],
    *,
    positions: Positions = None,
    sampler: Sampler | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    keep_stop: bool = True,
    max_tokens: int | None = None,
    grammar: Grammar | None = None,
    draft: Literal["ngram"] | Ngram | None = None,
    logprobs: int | None = None,
    seed: int | None = None,
    first_draw: int = 0,
    before: Iterable[int] | None = None,
    priority: int | None = None,
    deadline: float | None = None,
) -> AsyncGeneration:
    """Start a generation and wait for its first token: see `libsym.generate`.

    The tokens come from `async for token in await sym.aio.generate(kv, tokens)`.

    >>> kv = await sym.aio.kv_create()
    >>> generation = await sym.aio.generate(kv, [65], max_tokens=3)
    >>> [token async for token in generation]
    [65, 65, 65]
    """
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
        first_draw=first_draw,
        before=before,
        priority=priority,
        deadline=deadline,
    )
    call, state = generate_call(kv, tokens, options, positions)
    generation = AsyncGeneration(kv, call, state)
    await generation.fetch()
    return generation


async def generate_n(
    kv: KV, tokens: Iterable[int], n: int | Sequence[Sampler], **options: Unpack[Options]
) -> list[AsyncGeneration]:
    """Start `n` generations from one prompt and wait for the first token of each: see `libsym.generate_n`.

    >>> answers = await sym.aio.generate_n(await sym.aio.kv_create(), [65, 66], 2, max_tokens=3)
    >>> [[token async for token in answer] for answer in answers]
    [[66, 66, 66], [66, 66, 66]]
    """
    channel = channel_of(kv, "generate_n")
    generations = [AsyncGeneration(fork, *call) for fork, call in await run(channel, forked(kv, tokens, n, options))]
    failures: list[SymError] = []

    async def begin(generation: AsyncGeneration) -> None:
        try:
            await generation.fetch()
        except SymError as error:
            failures.append(error)

    async with create_task_group() as tasks:  # sends all requests before it waits for any reply
        for generation in generations:
            tasks.start_soon(begin, generation)
    if failures:
        raise failures[0]
    return generations


async def decode(
    kv: KV,
    tokens: Iterable[int],
    draw: Draw,
    *,
    beside: Beside = (),
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    max_tokens: int | None = None,
    attention: AttentionColumns | None = None,
) -> AsyncDecoding:
    """Run a decode loop with the program's own `draw`, perhaps a coroutine function: see `libsym.decode`.

    >>> decoding = await sym.aio.decode(await sym.aio.kv_create(), [65], sym.Dist.argmax, max_tokens=3)
    >>> [token async for token in decoding]
    [65, 65, 65]
    """
    state = Decoded(kv, tokens, beside, draw, max_tokens, attention)
    await run(state.channel, state.prepare(stop, stop_at_end=stop_at_end))
    return AsyncDecoding(state)


async def kv_write(kv: OpenFile, tokens: Iterable[int], positions: Positions = None) -> int:
    """Append tokens without asking for a distribution, and return the new length: see `libsym.kv_write`.

    >>> await sym.aio.kv_write(await sym.aio.kv_create(), [1, 2, 3])
    3
    """
    return await run(channel_of(kv, "kv_write"), write_script(kv, tokens, positions))


async def kv_open_or_compute(
    path: Path, compute: Compute, flags: Flags = "r", *, mode: int = 0o600, owner: Owner = None
) -> KV:
    """Open a KV file, or compute it if it is missing: see `libsym.kv_open_or_compute`.

    `compute` may be a coroutine function.

    >>> async with await sym.aio.kv_open_or_compute("prefix.kv", await sym.aio.tokenize("Be brief.")) as kv:
    ...     (await sym.aio.kv_stat(kv)).tokens
    9
    """
    channel = await connected()
    tokens = () if callable(compute) else int32(compute, "token")
    while True:
        kv, is_there = await run(channel, computed.claim_script(path, flags, mode, owner))
        if is_there:
            return kv
        try:
            if callable(compute):
                result = compute(kv)
                if isinstance(result, Awaitable):
                    await result
            else:
                await kv_write(kv, tokens)
            if await run(channel, computed.name_script(kv, path, flags)):
                return kv
        finally:
            if kv.path is None:
                await kv.__aexit__()  # closes the file without waiting


async def vocabulary() -> list[bytes]:
    """Return the bytes of each token, by its id: see `libsym.vocabulary`.

    >>> (await sym.aio.vocabulary())[65]
    b'A'
    """
    channel = await connected()
    return list(await run(channel, vocabulary_script(channel)))


async def token_set(wanted: Iterable[int] | Callable[[bytes], bool]) -> TokenSet:
    """Return a set of tokens, from ids or from a test of their bytes: see `libsym.token_set`.

    >>> len(await sym.aio.token_set(bytes.isdigit))
    10
    """
    channel = await connected()
    return await run(channel, token_set_script(channel, wanted))


async def send_to_user(x: Any, *more: Any) -> None:
    r"""Send text to the user who launched this program: see `libsym.send_to_user`.

    While the user does not read, this task waits, and the event loop goes on.

    >>> await sym.aio.send_to_user("hello\n")
    hello
    """
    await to_thread.run_sync(user.send_to_user, x, *more)


async def recv_from_user() -> str:
    r"""Wait for the next line of standard input: see `libsym.recv_from_user`. A cancelled task loses no line.

    >>> import io, sys
    >>> sys.stdin = io.StringIO("a line\n")
    >>> await sym.aio.recv_from_user()
    'a line'
    """
    stream = user.standard_input()
    if not isinstance(stream, int):
        return user.ended(await to_thread.run_sync(stream.readline))
    await checkpoint()
    while (line := user.lines.next_nowait(stream)) is None:
        await wait_readable(stream)
    return line


class Detokenizer:
    """Converter of tokens into text as the tokens come: see `libsym.Detokenizer`. `add` is a coroutine.

    >>> text = sym.aio.Detokenizer()
    >>> [await text.add(token) for token in (72, 105)]
    ['H', 'i']
    """

    def __init__(self) -> None:
        self._window = TextWindow()

    def __repr__(self) -> str:
        return f"<Detokenizer: {self._window.held!r} held back>"

    async def add(self, tokens: int | Iterable[int]) -> str:
        """Add one token or several, and return the text that no later token changes; often a word, sometimes nothing.

        >>> text = sym.aio.Detokenizer()
        >>> await text.add([72, 105])
        'Hi'
        """
        steps = self._window.add(tokens)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await detokenize(wanted))
        except StopIteration as stop:
            return str(stop.value)

    def flush(self) -> str:
        """Return the text that was held back, and make the Detokenizer ready for a new text.

        >>> text = sym.aio.Detokenizer()
        >>> await text.add(72), text.flush()
        ('H', '')
        """
        return self._window.flush()
