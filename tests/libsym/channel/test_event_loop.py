"""Calls from tasks, under trio and under asyncio, alone and beside threads."""

import gc
import inspect
import os
import threading
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

import libsym as sym
from libsym.abi import Op
from libsym.channel.client import ClientChannel
from libsym.channel.event_loop import AsyncStream, perform
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call
from libsym.errors import BadHandle
from tests.libsym.echo_client import Daemon, statistics, wait_until
from tests.libsym.echo_daemon import HOLD, MANY, RELEASE
from tests.libsym.faces import LOOPS, calls_held, ping


@pytest.fixture(params=LOOPS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_the_calls_have_coroutine_twins(connected: Daemon, backend: str) -> None:
    assert await sym.aio.detokenize(await sym.aio.tokenize("hello")) == "hello"
    async with await sym.aio.kv_create() as kv:
        assert (await sym.aio.pred(kv, [5, 7])).argmax() == 7
        async with await sym.aio.kv_fork(kv) as fork, await sym.aio.kv_lock(kv) as held:
            assert held is kv
            assert await sym.aio.kv_write(fork, [8]) == 3
            assert (await sym.aio.kv_read(fork))[0] == [5, 7, 8]
    assert kv.closed
    stat = await sym.aio.daemon_stat()
    assert (stat["open"], stat["locked"]) == ([], False)
    text = sym.aio.Detokenizer()
    assert "".join([await text.add(ord(c)) for c in "abc"]) + text.flush() == "abc"
    with pytest.raises(sym.BadHandle, match="closed"):
        await sym.aio.pred(kv, [1])


def test_every_public_call_has_a_twin_of_the_same_signature() -> None:
    not_calls = {"PRIORITY", "TTL", "command", "main", "perplexity"}  # for one, programs' loops, plain arithmetic
    calls = {name for name in sym.__all__ if inspect.isfunction(getattr(sym, name))} - not_calls
    assert calls <= set(sym.aio.__all__)
    for name in calls:
        mine, twin = inspect.signature(getattr(sym, name)), inspect.signature(getattr(sym.aio, name))
        assert mine.parameters == twin.parameters, name
        has_twin = name in {"generate", "generate_n", "decode"}  # what it gives has one, too
        assert has_twin or mine.return_annotation == twin.return_annotation, name
        assert inspect.iscoroutinefunction(getattr(sym.aio, name))


async def test_a_cancelled_task_cancels_its_call_and_the_others_go_on(client, observer, backend):
    answers: list[bytes] = []

    async def wait(payload: bytes, *, task_status: TaskStatus[anyio.CancelScope]) -> None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            answers.append((await perform(client, ping(payload=payload, flags=HOLD))).payload)

    async with anyio.create_task_group() as tasks:
        scopes = [await tasks.start(wait, b"%d" % number) for number in range(3)]
        await anyio.wait_all_tasks_blocked()
        scopes[0].cancel()  # the reader, which has to hand over
        await calls_held(observer, 2)
        scopes[2].cancel()
        await calls_held(observer, 1)
        observer.call(Op.PING, flags=RELEASE)
    assert answers == [b"1"]


async def test_what_a_cancelled_task_had_no_room_to_send_is_never_sent(client, observer, backend):
    """Not even by the task that reads when there is room: the call may be gone by then."""
    held = [client.stream(ping(flags=HOLD)) for _ in range(1024)]
    for each in held:
        each.start()
    stream = AsyncStream(client, ping(flags=HOLD))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await stream.next()
    assert scope.cancelled_caught
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(perform, client, ping())
        await anyio.wait_all_tasks_blocked()
        observer.call(Op.PING, flags=RELEASE)
    assert statistics(observer)["held_calls"] == 0


async def test_a_storm_of_cancellations_leaves_nothing_behind(client: ClientChannel, backend: str) -> None:
    """Files that were opened for tasks that are gone are closed, rows given back, and every other answer is right."""
    wrong: list[object] = []

    async def steady(number: int) -> None:
        for turn in range(50):
            reply = await perform(client, ping(1000 * number + turn))
            wrong.extend({reply.args[0]} - {1000 * number + turn})

    async def doomed(number: int) -> None:
        with anyio.move_on_after(0.0005 * (number % 7)):
            while True:
                await perform(client, Call(Op.KV_CREATE))

    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(steady, number)
            tasks.start_soon(doomed, number)
    assert wrong == []
    wait_until(client, "open", [])
    wait_until(client, "held_slots", 0)


async def test_a_stream_whose_wait_was_cancelled_goes_on_where_it_was(client, observer, backend):
    stream = AsyncStream(client, Call(Op.PING, flags=MANY | HOLD, args=(2, 0, 0, 0)))
    assert (await stream.next()).args[0] == 0
    with anyio.move_on_after(0.01) as scope:
        await stream.next()
    assert scope.cancel_called
    observer.call(Op.PING, flags=RELEASE)
    assert (await stream.next()).args[0] == 1


async def test_replies_are_passed_on_while_their_task_sleeps_and_an_error_reaches_that_task_alone(
    client, observer, backend
):
    """Each task takes its own replies, though one task reads for all. The task whose function fails gets the error."""
    taken: dict[str, list[int]] = {"failing": [], "steady": [], "cancelled": []}
    switches = 0

    async def each(name: str, count: int) -> None:
        def take(reply: Reply) -> bool:
            taken[name].append(reply.args[0])
            if name == "failing" and len(taken[name]) == 2:
                raise ValueError(name)
            return True

        nonlocal switches
        await AsyncStream(client, Call(Op.PING, flags=MANY | HOLD, args=(count, 0, 0, 0))).each(take)
        switches += 1

    async def failing() -> None:
        with pytest.raises(ValueError, match="failing"):
            await each("failing", 3)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(failing)
        tasks.start_soon(each, "steady", 40)
        with anyio.move_on_after(0.01) as scope:
            await each("cancelled", 2)
        assert scope.cancelled_caught
        observer.call(Op.PING, flags=RELEASE)
    assert taken == {"failing": [0, 1], "steady": list(range(40)), "cancelled": taken["cancelled"]}
    assert switches == 1
    assert statistics(observer)["held_calls"] == 0


@pytest.mark.slow
def test_several_loops_and_plain_threads_share_a_connection(client: ClientChannel) -> None:
    wrong: list[object] = []

    async def one(loop: int, task: int) -> None:
        for number in range(40):
            reply = await perform(client, Call(Op.PING, args=(loop, task, number, 0)))
            if reply.args[:3] != [loop, task, number]:
                wrong.append((loop, task, number))

    async def many(loop: int) -> None:
        async with anyio.create_task_group() as tasks:
            for task in range(20):
                tasks.start_soon(one, loop, task)

    def plain(thread: int) -> None:
        for number in range(300):
            reply = client.call(Op.PING, args=(thread, number, 0, 0))
            wrong.extend({(*reply.args,)} - {(thread, number, 0, 0)})

    threads = [threading.Thread(target=plain, args=(n,)) for n in range(3)]
    threads += [
        threading.Thread(target=lambda n=n, backend=backend: anyio.run(many, n, backend=backend))
        for n, backend in enumerate(LOOPS * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_a_thread_that_leaves_does_not_strand_a_task(client: ClientChannel, observer: ClientChannel) -> None:
    """The thread leads while the task sleeps; when its own reply has come, the task's must still be noticed."""

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                threads = [threading.Thread(target=client.call, args=(Op.PING,)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                tasks.start_soon(perform, client, ping())
                with anyio.fail_after(30):
                    await perform(client, ping())
                for thread in threads:
                    thread.join()

    anyio.run(program, backend="asyncio")


@pytest.mark.slow
def test_a_loop_leaves_no_descriptor_behind(client: ClientChannel, backend: str) -> None:
    client.call(Op.PING)
    anyio.run(perform, client, ping(), backend=backend)
    before = num_descriptors()
    for _ in range(20):
        anyio.run(perform, client, ping(), backend=backend)
    gc.collect()
    assert num_descriptors() <= before + 2


async def test_a_forked_child_may_not_go_on_with_its_parents_loop(client: ClientChannel) -> None:
    await perform(client, ping())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            await perform(client, ping())
        except BadHandle:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - a moment
    assert (await perform(client, ping(7))).args[0] == 7
