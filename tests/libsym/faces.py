"""Callers of each kind: threads that wait for their replies, and tasks of each event loop."""

import os
import threading
from collections.abc import Awaitable, Callable

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from libsym.abi import Op
from libsym.channel import event_loop
from libsym.channel.client import ClientChannel, Stream
from libsym.channel.event_loop import AsyncStream
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call
from tests.libsym.echo_client import statistics

LOOPS = ("trio", "asyncio")
FACES = ("threads", *LOOPS)


def ping(number: int = 0, payload: bytes = b"", *, flags: int = 0) -> Call:
    return Call(Op.PING, flags=flags, args=(number, 0, 0, 0), payload=payload)


async def calls_held(observer: ClientChannel, count: int) -> None:
    """Asks the daemon until it holds so many; the test's own timeout ends a wait for nothing."""
    while statistics(observer)["held_calls"] != count:
        await checkpoint()


class ThreadStream:
    """A stream of which each reply is awaited in a thread."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def next(self) -> Reply:
        return await to_thread.run_sync(self.stream.next, limiter=anyio.CapacityLimiter(1))


class Face:
    """A kind of callers, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run_test(self, program: Callable[[], Awaitable[None]]) -> None:
        anyio.run(program, backend="asyncio" if self.name == "threads" else self.name)

    async def perform(self, client: ClientChannel, call: Call) -> Reply:
        if self.name == "threads":
            return await to_thread.run_sync(client.perform, call, limiter=anyio.CapacityLimiter(1))
        return await event_loop.perform(client, call)

    def stream(self, client: ClientChannel, call: Call) -> ThreadStream | AsyncStream:
        return ThreadStream(client.stream(call)) if self.name == "threads" else AsyncStream(client, call)


def run_threads(target: Callable[[int], object], count: int) -> None:
    """Runs `target` with its number in so many threads at once, to their ends."""
    threads = [threading.Thread(target=target, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def is_true_in_a_child(act: Callable[[], bool]) -> bool:
    """Whether `act` gives True in a forked child, which then ends at once."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if act() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
