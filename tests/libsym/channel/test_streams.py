"""Calls with many replies, batches, and who owns the slots that they bring."""

import errno
import gc
import struct
import threading
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from libsym.abi import ROWS_LAST, Finish, Op
from libsym.calls.generate import Progress, Started
from libsym.channel.client import ClientChannel, Stream
from libsym.channel.event_loop import perform
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call
from libsym.errors import NotConnected, ProtocolError, SymError
from tests.libsym.echo_client import statistics, wait_until
from tests.libsym.echo_daemon import BEST_LOGIT, HOLD, MANY, RELEASE, REQUEST
from tests.libsym.faces import run_threads
from tests.libsym.interrupts import ends_before


def stream(client: ClientChannel, count: int, *, flags: int = 0, payload: bytes = b"") -> Stream:
    return client.stream(Call(Op.PING, flags=MANY | flags, args=(count, 0, 0, 0), payload=payload))


@pytest.mark.slow
def test_a_stream_that_is_dropped_is_cancelled_at_the_daemon(client: ClientChannel) -> None:
    found = stream(client, 3, flags=HOLD)
    assert found.next().args[0] == 0
    assert statistics(client)["held_calls"] == 1
    del found
    gc.collect()
    wait_until(client, "held_calls", 0)
    assert statistics(client)["num_cancelled"] == 1


def test_a_cancelled_stream_gives_what_was_sent_and_then_its_end(client: ClientChannel) -> None:
    found = stream(client, 3, flags=HOLD)
    assert found.next().args[0] == 0
    found.cancel()
    assert found.next().args[0] == 1
    with pytest.raises(SymError) as caught:
        found.next()
    assert caught.value.errno == errno.ECANCELED
    assert found.is_over


def test_what_came_before_the_daemon_died_can_be_read_and_then_the_stream_is_over(start_daemon):
    daemon = start_daemon()
    client = daemon.client()
    found = stream(client, 100, flags=HOLD)
    found.next()
    client.call(Op.PING)  # behind the reply before the last
    daemon.kill()
    assert [found.next().args[0] for _ in range(98)] == list(range(1, 99))
    with pytest.raises(NotConnected):
        found.next()
    assert found.is_over


def test_threads_that_stream_and_threads_that_call_share_a_connection(client: ClientChannel) -> None:
    """A stream's thread may leave with a reply while others wait: somebody must go on leading."""
    wrong: list[object] = []

    def talk(thread: int) -> None:
        for count in range(1, 40 if thread % 2 else 0):
            found = stream(client, count)
            wrong.extend(number for number in range(count) if found.next().args[0] != number)
        for number in range(0 if thread % 2 else 500):
            reply = client.call(Op.PING, args=(thread, number, 0, 0))
            wrong.extend({(*reply.args,)} - {(thread, number, 0, 0)})

    run_threads(talk, 8)
    assert wrong == []


def part(handle: int, *tokens: int) -> bytes:
    payload = struct.pack(f"={len(tokens)}i", *tokens)
    head = REQUEST.pack(64 + len(payload), Op.PRED, 0, ROWS_LAST, 0, 0, handle, len(tokens), 0, 0, 0)
    return head + payload + bytes(-len(payload) % 64)


def batch(client: ClientChannel, *frames: bytes, flags: int = 0) -> Reply:
    return client.call(Op.PRED_BATCH, flags=flags, args=(len(frames), 0, 0, 0), payload=b"".join(frames))


@pytest.mark.parametrize("reads_tokens", [False, True])
def test_ctrl_c_at_any_moment_loses_nothing_of_a_stream_and_repeats_nothing(client, reads_tokens):
    whole, payload = ([5] * 4, array("i", [5]).tobytes()) if reads_tokens else ([0, 1, 2], b"")
    moment, is_done = 0, False
    while not is_done:
        moment += 1
        taken: list[int] = []
        found = stream(client, 5 if reads_tokens else 3, payload=payload)
        if reads_tokens:
            found.start()

        def read_on(found: Stream = found, taken: list[int] = taken) -> None:
            while reads_tokens and found.tokens(lambda tokens, _first, _entries: taken.extend(tokens)):
                pass
            while not reads_tokens and len(taken) < 3:
                found.next(lambda reply: taken.append(reply.args[0]))

        is_done = ends_before(moment, read_on)
        read_on()
        assert taken == whole, f"at moment {moment}"
    assert moment > (5 if reads_tokens else 20)


def test_tokens_come_as_many_as_are_there_and_what_is_no_token_is_left_to_next(client: ClientChannel) -> None:
    taken: list[int] = []
    found = stream(client, 300, payload=array("i", [5, 6]).tobytes())
    assert not found.tokens(lambda *_: None), "it is not started"
    found.start()
    while found.tokens(lambda tokens, _first, _entries: taken.extend(tokens)):
        pass
    assert taken == [5, 6] * 299
    last = found.next()
    assert (last.args[0], last.more, found.is_over) == (299, False, True)
    assert not found.tokens(lambda *_: None), "nothing comes any more"


def test_an_error_after_tokens_is_raised_by_next(client: ClientChannel) -> None:
    found = stream(client, 2, flags=HOLD, payload=array("i", [5]).tobytes())
    found.start()
    taken: list[int] = []
    assert found.tokens(lambda tokens, _first, _entries: taken.extend(tokens))
    client.close()
    assert not found.tokens(lambda *_: None)
    with pytest.raises(NotConnected):
        found.next()
    assert taken == [5]


def test_ctrl_c_at_any_moment_leaves_a_generation_that_took_a_reply_whole_or_not_at_all(client: ClientChannel) -> None:
    reply = client.call(Op.PING, args=(2, 7, Finish.STOP_TOKEN, 9), payload=array("i", [5, 6]).tobytes())
    moment, is_done = 0, False
    while not is_done:
        moment += 1
        kv: Any = SimpleNamespace(closed=False, num_cuts=0)
        progress = Progress(kv, Started(0))
        is_done = ends_before(moment, partial(progress.take, reply))
        state = (progress.tokens, progress.pending, progress.finish, progress.stopped_by)
        assert state in (([], [], None, None), ([5, 6], [5, 6], "stop_token", 9))
    assert moment > 2


@pytest.mark.slow
def test_each_part_of_a_batch_owns_its_own_rows_and_one_that_failed_says_so(client: ClientChannel) -> None:
    handle = client.call(Op.KV_CREATE).claim()
    parts = batch(client, part(handle, 5), part(handle, 6, 7), part(handle + 1, 6)).parts()
    failed = parts[2].error
    assert failed is not None
    assert failed.errno == errno.EBADF
    with pytest.raises(ProtocolError):
        parts[2].rows()
    rows = [each.rows() for each in parts[:2]]
    assert [rows[0][5], rows[1][7], parts[0].error] == [BEST_LOGIT, BEST_LOGIT, None]
    del parts
    for num_held in (2, 1, 0):
        gc.collect()
        assert statistics(client)["held_slots"] == num_held
        del rows[-1:]
    with pytest.raises(ProtocolError, match="batch"):
        client.call(Op.PING, payload=bytes(128)).parts()


@pytest.mark.parametrize("take", [lambda reply: reply, lambda reply: reply.parts()], ids=["reply", "parts"])
def test_a_batch_whose_rows_nobody_asks_for_gives_them_back(client, take):
    handle = client.call(Op.KV_CREATE).claim()
    whole = take(batch(client, part(handle, 5), part(handle, 6)))
    assert statistics(client)["held_slots"] == 2
    del whole
    assert statistics(client)["held_slots"] == 0


@pytest.mark.parametrize("backend", ["asyncio"])
async def test_a_batch_that_arrives_too_late_gives_its_rows_back(client, backend):
    handle = client.call(Op.KV_CREATE).claim()
    late = Call(Op.PRED_BATCH, flags=HOLD, args=(2, 0, 0, 0), payload=part(handle, 5) + part(handle, 6))
    with anyio.move_on_after(0.01):
        await perform(client, late)
    assert statistics(client)["held_slots"] == 2
    client.call(Op.PING, flags=RELEASE)
    wait_until(client, "held_slots", 0)


def test_a_stream_may_be_closed_while_another_thread_waits_for_it(client: ClientChannel) -> None:
    found = stream(client, 2, flags=HOLD)
    found.next()
    errors: list[int | None] = []

    def wait() -> None:
        try:
            found.next()
        except SymError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(client, "held_calls", 1)
    found.close()
    thread.join()
    assert set(errors) <= {errno.ECANCELED, errno.EINVAL}
    assert len(errors) == 1
