"""Calls from threads, and from tasks under trio and asyncio: what holds for all of them."""

import os
import signal

import anyio
import anyio.lowlevel
import pytest

from libsym.abi import MAX_FRAME_BYTES, Op
from libsym.channel.client import ClientChannel
from libsym.channel.scripts import Call
from libsym.errors import BadHandle, Invalid, NotConnected, SymError, TooLarge
from tests.libsym.echo_client import Daemon
from tests.libsym.echo_daemon import HOLD, MANY, RELEASE
from tests.libsym.faces import FACES, Face, calls_held, ping


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Face:
    return Face(request.param)


@pytest.mark.parametrize("num_calls", [1, pytest.param(1500, marks=pytest.mark.slow)])
async def test_calls_that_the_daemon_holds_hold_up_no_others_until_as_many_as_may_be_are_under_way(
    client, observer, face, num_calls
):
    """1,024 are under way in a process; the others are sent as those end."""
    done: dict[int, bytes] = {}

    async def one(number: int) -> None:
        done[number] = (await face.perform(client, ping(number, b"%d" % number, flags=HOLD))).payload

    async with anyio.create_task_group() as tasks:
        for number in range(num_calls):
            tasks.start_soon(one, number)
        await calls_held(observer, min(num_calls, 1024))
        if num_calls == 1:  # the caller that waits longest leads, and has to hand on what is not its own
            for number in range(50):
                assert (await face.perform(client, ping(number))).args[0] == number
        assert done == {}
        while len(done) < num_calls:
            observer.call(Op.PING, flags=RELEASE)
            await anyio.lowlevel.checkpoint()
    assert done == {number: b"%d" % number for number in range(num_calls)}


@pytest.mark.slow
async def test_a_full_ring_makes_callers_wait_and_loses_nothing(daemon: Daemon, face: Face) -> None:
    """The daemon is stopped while more is submitted than the ring holds; other tasks of a loop go on."""
    client = daemon.client()
    payload = bytes(MAX_FRAME_BYTES // 2)
    sizes: list[int] = []

    async def one() -> None:
        sizes.append(len((await face.perform(client, ping(payload=payload))).payload))

    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(0.25 if face.name == "threads" else 0)  # nothing else tells that they wait
            assert sizes == []
            os.kill(daemon.process.pid, signal.SIGCONT)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    assert sizes == [len(payload)] * 8
    client.close()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_every_wait_ends_when_the_daemon_is_killed_or_the_connection_closed(
    start_daemon, daemon, face, is_killed
):
    doomed = start_daemon() if is_killed else daemon
    client, observer = doomed.client(), doomed.client()
    errors: list[SymError] = []

    async def one() -> None:
        try:
            await face.perform(client, ping(flags=HOLD))
        except SymError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(one)
        await calls_held(observer, 10)
        if is_killed:
            doomed.kill()
        else:
            client.close()
    with pytest.raises(NotConnected):
        await face.perform(client, ping())
    if not is_killed:
        await calls_held(observer, 0)
    assert [type(error) for error in errors] == [NotConnected] * 10
    told = (doomed.path, "symphony serve") if is_killed else (doomed.path, "closed by this program")
    assert all(words in str(errors[0]) for words in told)


async def test_errors_arrive_with_their_class_and_words(client: ClientChannel, face: Face) -> None:
    refused: list[tuple[Call, type[SymError], str]] = [
        (Call(Op.KV_CLOSE, handle=77), BadHandle, "handle 77 is not open"),
        (ping(payload=bytes(2 << 20)), TooLarge, "2097152 bytes"),
        (Call(Op.PING, args=("x", 0, 0, 0)), Invalid, "whole number"),  # type: ignore[arg-type]  # refused here
    ]
    for call, error, words in refused:
        with pytest.raises(error, match=words):
            await face.perform(client, call)


async def test_streams_come_reply_by_reply(client: ClientChannel, face: Face) -> None:
    async def read(count: int) -> None:
        stream = face.stream(client, Call(Op.PING, flags=MANY, args=(count, 0, 0, 0)))
        replies = [await stream.next() for _ in range(count)]
        assert [reply.args[0] for reply in replies] == list(range(count))
        assert [reply.more for reply in replies] == [True] * (count - 1) + [False]
        with pytest.raises(Invalid, match="nothing more"):
            await stream.next()

    async with anyio.create_task_group() as tasks:
        for count in range(1, 30):
            tasks.start_soon(read, count)


async def test_only_one_caller_at_a_time_waits_for_a_stream(client, observer, face):
    """The others are told so: one that found the end taken from under it would have nothing to return."""
    found: list[int] = []
    refused: list[str] = []
    stream = face.stream(client, Call(Op.PING, flags=MANY | HOLD, args=(2, 0, 0, 0)))

    async def wait() -> None:
        try:
            found.append((await stream.next()).args[0])
        except Invalid as error:
            refused.append(str(error))
            if len(refused) == 7:
                observer.call(Op.PING, flags=RELEASE)

    await stream.next()
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(wait)
    assert found == [1]
    who = face.name.removesuffix("s") if face.name == "threads" else "task"
    assert refused == [f"another {who} waits for the next reply: only one at a time may"] * 7
