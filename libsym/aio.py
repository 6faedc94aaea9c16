"""The system calls as coroutines, under anyio: for programs of trio and of asyncio.

    >>> import libsym as sym
    >>> async def answer(question: str) -> str:
    ...     async with await sym.aio.kv_create() as kv:
    ...         dist = await sym.aio.pred(kv, await sym.aio.tokenize(question))
    ...         return await sym.aio.detokenize([dist.argmax()])
    >>> await answer("Why?")  # at the prompt of `python -m asyncio`; in a program: anyio.run(answer, "Why?")
    '?'

The names, arguments and errors are those of `libsym`, where each is described. A thousand tasks may call at once;
threads of the same program may, too. Cancelling a task ends its call at the daemon: a `pred` that has not begun appends
nothing, a `recv` takes no message away.

`KV` and `Dist` objects are the same; methods of `KV` that call the daemon block the loop, the functions here do not.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from anyio import to_thread, wait_readable
from anyio.lowlevel import checkpoint

from libsym import advice as advising
from libsym import api, computed, messages, names, usage, user
from libsym import kv as files
from libsym import status as daemon
from libsym import text as texts
from libsym.advice import Advised
from libsym.arguments import Path, int32
from libsym.async_generation import AsyncGeneration
from libsym.channel.client import ClientChannel
from libsym.channel.event_loop import run
from libsym.channel.process import process
from libsym.channel.scripts import Script
from libsym.generate import Grammar, Ngram, generate_call
from libsym.info import KvEntry, KvStat, ModelInfo
from libsym.kv import KV, Flags, Locked, Range
from libsym.open_file import OpenFile, channel_of
from libsym.pred import (
    Mask,
    Positions,
    Pred,
    Rows,
    batch_channel,
    batch_of,
    batch_script,
    pred_script,
    write_script,
)
from libsym.rows.dist import Dist
from libsym.rows.reduced import ReducedDist
from libsym.rows.sampler import Sampler
from libsym.text import TextWindow
from libsym.usage import Usage
from libsym.vocabulary import vocabulary_script

T = TypeVar("T")
Compute = Iterable[int] | Callable[[KV], object]
"""What a file is to have: its tokens, or a function that fills it, a coroutine function if need be."""

__all__ = [
    "AsyncGeneration",
    "Detokenizer",
    "chat_template",
    "chat_tokens",
    "close",
    "connect",
    "daemon_check",
    "daemon_stat",
    "detokenize",
    "generate",
    "getpid",
    "getrusage",
    "kv_advise",
    "kv_chmod",
    "kv_close",
    "kv_create",
    "kv_du",
    "kv_extract",
    "kv_fork",
    "kv_list",
    "kv_lock",
    "kv_merge",
    "kv_mkdir",
    "kv_open",
    "kv_open_or_compute",
    "kv_read",
    "kv_remove",
    "kv_rename",
    "kv_stat",
    "kv_sync",
    "kv_truncate",
    "kv_unlock",
    "kv_write",
    "model_info",
    "pred",
    "pred_batch",
    "recv",
    "recv_from_user",
    "send",
    "send_to_user",
    "subscribe",
    "tokenize",
    "unsubscribe",
    "vocabulary",
]


async def connected() -> ClientChannel:
    """The connection of this process; the first task that calls has a thread make it."""
    found = process.connected
    return found if found is not None else await to_thread.run_sync(process.channel)


async def _run(script: Script[T]) -> T:
    return await run(await connected(), script)


async def _read(kv: KV | Path, read: Callable[[KV], Script[T]]) -> T:
    channel = kv.channel if isinstance(kv, KV) else await connected()
    return await run(channel, files.reading_script(channel, kv, read))


async def connect(socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None) -> None:
    """As `libsym.connect`."""
    await to_thread.run_sync(lambda: api.connect(socket, domain=domain))


async def close() -> None:
    """As `libsym.close`.

    >>> await sym.aio.close()
    """
    api.close()


async def model_info() -> ModelInfo:
    """As `libsym.model_info`.

    >>> (await sym.aio.model_info()).name
    'tiny'
    """
    return await _run(daemon.model_info_script())


async def daemon_stat() -> dict[str, Any]:
    """As `libsym.daemon_stat`.

    >>> (await sym.aio.daemon_stat())["model"]
    'tiny'
    """
    return await _run(daemon.daemon_stat_script())


async def daemon_check() -> dict[str, int]:
    """As `libsym.daemon_check`."""
    return await _run(daemon.daemon_check_script())


@overload
async def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: None = None,
    logprobs: None = None,
    sampler: None = None,
    mask: Mask | None = None,
    priority: int | None = None,
) -> Dist: ...
@overload
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
) -> Dist | ReducedDist:
    """As `libsym.pred`.

    >>> kv = await sym.aio.kv_create()
    >>> (await sym.aio.pred(kv, [65, 66])).argmax()
    66
    """
    wanted = Pred(kv, tokens, positions, rows, top_k, logprobs, sampler, mask, priority)
    return await run(channel_of(kv, "pred"), pred_script(wanted))


async def pred_batch(preds: Iterable[Pred]) -> list[Dist | ReducedDist]:
    """As `libsym.pred_batch`.

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
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    max_tokens: int | None = None,
    grammar: Grammar | None = None,
    draft: Literal["ngram"] | Ngram | None = None,
    seed: int | None = None,
    priority: int | None = None,
) -> AsyncGeneration:
    """As `libsym.generate`, and waits for the first token: `async for token in await sym.aio.generate(kv, tokens)`.

    >>> kv = await sym.aio.kv_create()
    >>> generation = await sym.aio.generate(kv, [65], max_tokens=3)
    >>> [token async for token in generation]
    [65, 65, 65]
    """
    call, state = generate_call(
        kv, tokens, positions, sampler, stop, stop_at_end, max_tokens, grammar, draft, seed, priority
    )
    generation = AsyncGeneration(kv, call, state)
    await generation.fetch()
    return generation


async def vocabulary() -> list[bytes]:
    """As `libsym.vocabulary`.

    >>> (await sym.aio.vocabulary())[65]
    b'A'
    """
    channel = await connected()
    return list(await run(channel, vocabulary_script(channel)))


async def kv_create(path: Path | None = None, mode: int = 0o600) -> KV:
    """As `libsym.kv_create`; `async with` closes the file without waiting.

    >>> async with await sym.aio.kv_create("a.kv") as kv:
    ...     print(kv.path)
    a.kv
    """
    channel = await connected()
    return await run(channel, files.create_script(channel, path, mode))


async def kv_open(path: Path, flags: Flags = "r") -> KV:
    """As `libsym.kv_open`; `async with` closes the file without waiting.

    >>> await sym.aio.kv_close(await sym.aio.kv_create("a.kv"))
    >>> (await sym.aio.kv_open("a.kv")).writable
    False
    """
    channel = await connected()
    return await run(channel, files.open_script(channel, path, flags))


async def kv_open_or_compute(path: Path, compute: Compute, flags: Flags = "r", *, mode: int = 0o600) -> KV:
    """As `libsym.kv_open_or_compute`; `compute` may be a coroutine function.

    >>> async with await sym.aio.kv_open_or_compute("prefix.kv", await sym.aio.tokenize("Be brief.")) as kv:
    ...     (await sym.aio.kv_stat(kv)).tokens
    9
    """
    channel = await connected()
    tokens = () if callable(compute) else int32(compute, "token")
    while True:
        kv, is_there = await run(channel, computed.claim_script(channel, path, flags, mode))
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
                await kv.__aexit__()  # waits for nothing


async def kv_close(kv: KV) -> None:
    """As `libsym.kv_close`.

    >>> kv = await sym.aio.kv_create()
    >>> await sym.aio.kv_close(kv)
    >>> kv.closed
    True
    """
    await run(channel_of(kv, "kv_close"), files.close_script(kv))


async def kv_fork(kv: KV | Path, path: Path | None = None, *, mode: int = 0o600) -> KV:
    """As `libsym.kv_fork`.

    >>> base = await sym.aio.kv_create()
    >>> length = await sym.aio.kv_write(base, [1, 2])
    >>> await sym.aio.kv_read(await sym.aio.kv_fork(base))
    ([1, 2], [0, 1])
    """
    return await _read(kv, lambda file: files.fork_script(file, path, mode=mode))


async def kv_extract(
    kv: KV | Path, ranges: Iterable[Range], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600
) -> KV:
    """As `libsym.kv_extract`.

    >>> kv = await sym.aio.kv_create()
    >>> length = await sym.aio.kv_write(kv, [1, 2, 3])
    >>> await sym.aio.kv_read(await sym.aio.kv_extract(kv, [(1, None)]))
    ([2, 3], [0, 1])
    """
    return await _read(kv, lambda file: files.extract_script(file, ranges, path, rebase=rebase, mode=mode))


async def kv_merge(kvs: Iterable[KV | Path], path: Path | None = None, rebase: bool = True, *, mode: int = 0o600) -> KV:
    """As `libsym.kv_merge`.

    >>> kv = await sym.aio.kv_create()
    >>> length = await sym.aio.kv_write(kv, [1, 2])
    >>> await sym.aio.kv_read(await sym.aio.kv_merge([kv, kv]))
    ([1, 2, 1, 2], [0, 1, 2, 3])
    """
    channel = await connected()
    return await run(channel, files.merge_script(channel, kvs, path, rebase=rebase, mode=mode))


async def kv_lock(kv: KV, *, shared: bool = False, blocking: bool = True) -> Locked:
    """As `libsym.kv_lock`; `async with` gives it back without waiting.

    >>> kv = await sym.aio.kv_create()
    >>> async with await sym.aio.kv_lock(kv):
    ...     await sym.aio.kv_write(kv, [1])
    1
    """
    return await run(channel_of(kv, "kv_lock"), files.lock_script(kv, shared=shared, blocking=blocking))


async def kv_unlock(kv: KV) -> None:
    """As `libsym.kv_unlock`.

    >>> kv = await sym.aio.kv_create()
    >>> lock = await sym.aio.kv_lock(kv)
    >>> await sym.aio.kv_unlock(kv)
    """
    await run(channel_of(kv, "kv_unlock"), files.unlock_script(kv))


async def kv_remove(kv: KV | Path) -> None:
    """As `libsym.kv_remove`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> await sym.aio.kv_remove(kv)
    >>> await sym.aio.kv_list()
    []
    """
    await run(kv.channel if isinstance(kv, KV) else await connected(), files.remove_script(kv))


async def kv_write(kv: OpenFile, tokens: Iterable[int], positions: Positions = None) -> int:
    """As `libsym.kv_write`.

    >>> await sym.aio.kv_write(await sym.aio.kv_create(), [1, 2, 3])
    3
    """
    return await run(channel_of(kv, "kv_write"), write_script(kv, tokens, positions))


async def kv_read(kv: KV | Path, start: int = 0, stop: int | None = None) -> tuple[list[int], list[int]]:
    """As `libsym.kv_read`.

    >>> kv = await sym.aio.kv_create()
    >>> length = await sym.aio.kv_write(kv, [7, 8, 9])
    >>> await sym.aio.kv_read(kv, 1)
    ([8, 9], [1, 2])
    """
    return await _read(kv, lambda file: files.read_script(file, start, stop))


async def kv_truncate(kv: KV, num_tokens: int) -> None:
    """As `libsym.kv_truncate`.

    >>> kv = await sym.aio.kv_create()
    >>> length = await sym.aio.kv_write(kv, [7, 8, 9])
    >>> await sym.aio.kv_truncate(kv, 1)
    >>> (await sym.aio.kv_stat(kv)).tokens
    1
    """
    await run(channel_of(kv, "kv_truncate"), files.truncate_script(kv, num_tokens))


async def kv_stat(kv: KV | Path) -> KvStat:
    """As `libsym.kv_stat`.

    >>> (await sym.aio.kv_stat(await sym.aio.kv_create())).tokens
    0
    """
    return await run(kv.channel if isinstance(kv, KV) else await connected(), files.stat_script(kv))


async def kv_list(path: Path = ".") -> list[KvEntry]:
    """As `libsym.kv_list`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> [entry.name for entry in await sym.aio.kv_list()]
    ['a.kv']
    """
    return await _run(names.list_script(path))


async def kv_mkdir(path: Path, mode: int = 0o700, *, parents: bool = False) -> None:
    """As `libsym.kv_mkdir`.

    >>> await sym.aio.kv_mkdir("docs")
    >>> [entry.kind for entry in await sym.aio.kv_list()]
    ['dir']
    """
    await _run(names.mkdir_script(path, mode, parents=parents))


async def kv_rename(old: Path, new: Path) -> None:
    """As `libsym.kv_rename`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> await sym.aio.kv_rename("a.kv", "b.kv")
    >>> [entry.name for entry in await sym.aio.kv_list()]
    ['b.kv']
    """
    channel = await connected()
    await run(channel, names.rename_script(channel, old, new))


async def kv_chmod(path: Path, mode: int) -> None:
    """As `libsym.kv_chmod`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> await sym.aio.kv_chmod("a.kv", 0o644)
    >>> oct((await sym.aio.kv_stat(kv)).mode)
    '0o644'
    """
    await _run(names.chmod_script(path, mode))


async def kv_du(path: Path = ".") -> dict[str, Any]:
    """As `libsym.kv_du`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> (await sym.aio.kv_du())["total"]["pages"]
    0
    """
    return await _run(names.du_script(path))


async def tokenize(text: str, *, special: bool = True) -> list[int]:
    """As `libsym.tokenize`.

    >>> await sym.aio.tokenize("Hi")
    [72, 105]
    """
    return await _run(texts.tokenize_script(text, special=special))


async def detokenize(tokens: Iterable[int]) -> str:
    """As `libsym.detokenize`.

    >>> await sym.aio.detokenize([72, 105])
    'Hi'
    """
    return await _run(texts.detokenize_script(tokens))


async def chat_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
) -> str:
    r"""As `libsym.chat_template`.

    >>> await sym.aio.chat_template([{"role": "user", "content": "Hello"}])
    '<bos>user: Hello\nassistant: '
    """
    return await _run(texts.chat_template_script(messages, tools, add_generation_prompt=add_generation_prompt))


async def chat_tokens(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    after_answer: bool = False,
) -> list[int]:
    r"""As `libsym.chat_tokens`.

    >>> await sym.aio.detokenize(await sym.aio.chat_tokens([{"role": "user", "content": "Hello"}]))
    '<bos>user: Hello\nassistant: '
    """
    return await _run(
        texts.chat_tokens_script(
            messages, tools, add_generation_prompt=add_generation_prompt, after_answer=after_answer
        )
    )


async def kv_advise(kv: KV | Path, *advice: Advised) -> None:
    """As `libsym.kv_advise`.

    >>> kv = await sym.aio.kv_create("a.kv")
    >>> await sym.aio.kv_advise(kv, sym.PIN)
    >>> (await sym.aio.kv_stat(kv)).pinned
    True
    """
    channel = kv.channel if isinstance(kv, KV) else await connected()
    await run(channel, advising.advise_script(kv, *advice))


async def kv_sync(kv: KV) -> None:
    """As `libsym.kv_sync`.

    >>> try:
    ...     await sym.aio.kv_sync(await sym.aio.kv_create())
    ... except sym.NotSupported:
    ...     print("not yet")
    not yet
    """
    await run(channel_of(kv, "kv_sync"), advising.sync_script(kv))


async def send(to: int | str, x: object) -> int:
    """As `libsym.send`.

    >>> await sym.aio.send(await sym.aio.getpid(), "to myself")
    1
    """
    return await _run(messages.send_script(to, x))


async def recv(topic: str | None = None, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - the daemon's
    """As `libsym.recv`. A task that is cancelled takes no message away.

    >>> await sym.aio.send(await sym.aio.getpid(), "to myself")
    1
    >>> await sym.aio.recv(timeout=1)
    'to myself'
    """
    return await _run(messages.recv_script(topic, timeout=timeout))


async def subscribe(topic: str) -> None:
    """As `libsym.subscribe`.

    >>> await sym.aio.subscribe("news")
    >>> await sym.aio.send("news", "first")
    1
    """
    await _run(messages.subscribe_script(topic))


async def unsubscribe(topic: str) -> None:
    """As `libsym.unsubscribe`.

    >>> await sym.aio.subscribe("news")
    >>> await sym.aio.unsubscribe("news")
    >>> await sym.aio.send("news", "to nobody")
    0
    """
    await _run(messages.unsubscribe_script(topic))


async def getpid() -> int:
    """As `libsym.getpid`.

    >>> await sym.aio.getpid() == sym.getpid()
    True
    """
    return await _run(usage.getpid_script())


async def getrusage() -> Usage:
    """As `libsym.getrusage`.

    >>> (await sym.aio.getrusage()).failed_calls
    0
    """
    return await _run(usage.getrusage_script())


async def send_to_user(x: Any) -> None:
    r"""As `libsym.send_to_user`; a user who does not read stops this task, not the loop.

    >>> await sym.aio.send_to_user("hello\n")
    hello
    """
    await to_thread.run_sync(user.send_to_user, x)


async def recv_from_user() -> str:
    r"""As `libsym.recv_from_user`. A task that is cancelled takes no line away.

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
    """As `libsym.Detokenizer`; `add` is a coroutine.

    >>> text = sym.aio.Detokenizer()
    >>> [await text.add(token) for token in (72, 105)]
    ['H', 'i']
    """

    def __init__(self) -> None:
        self._window = TextWindow()

    async def add(self, tokens: int | Iterable[int]) -> str:
        """The text that one more token, or several, make certain; often a word, sometimes nothing.

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
        """What was kept back; then the Detokenizer is ready for a new text.

        >>> text = sym.aio.Detokenizer()
        >>> await text.add(72), text.flush()
        ('H', '')
        """
        return self._window.flush()
