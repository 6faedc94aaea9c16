"""Calls between real processes: the routing of replies, and the effects of processes that go away."""

import errno
import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from libsym.abi import MAX_FRAME_BYTES, RING_BYTES, ROWS_LAST, Op
from libsym.channel.client import ClientChannel
from libsym.channel.scripts import Call
from libsym.errors import BadHandle, SymError, TooLarge
from tests.libsym.echo_client import statistics, wait_until
from tests.libsym.echo_daemon import BIG, FAIL, HOLD, RELEASE
from tests.libsym.faces import is_true_in_a_child


def test_a_reply_carries_what_the_request_carried_or_its_error(client: ClientChannel) -> None:
    reply = client.call(Op.PING, args=(1, -2, 2**63 - 1, -(2**63)), payload=b"hello")
    assert (reply.args, reply.payload) == ([1, -2, 2**63 - 1, -(2**63)], b"hello")
    with pytest.raises(SymError, match="strange") as caught:
        client.call(Op.PING, flags=FAIL, args=(errno.EXFULL, 0, 0, 0), payload=b"strange")
    assert caught.value.errno == errno.EXFULL
    with pytest.raises(TooLarge, match="1048513 bytes"):
        client.call(Op.PING, payload=bytes(MAX_FRAME_BYTES - 63))
    with pytest.raises(TooLarge, match="ask for less"):
        client.call(Op.PING, flags=BIG, args=(MAX_FRAME_BYTES, 0, 0, 0))


def test_payloads_of_every_size_come_back_whole_also_around_the_end_of_both_rings(client: ClientChannel) -> None:
    sent = 0
    odd_sizes = [size % 200_000 for size in range(1, 2 * RING_BYTES, 40_961)]
    for size in (0, 1, 63, 64, 65, 4096, MAX_FRAME_BYTES - 64, *odd_sizes):
        payload = os.urandom(size)
        assert client.call(Op.PING, payload=payload).payload == payload
        sent += len(payload)
    assert sent > 2 * RING_BYTES


@pytest.fixture
def interrupter(observer: ClientChannel) -> Iterator[threading.Thread]:
    """Thread that sends this process a Ctrl-C as soon as the daemon holds a call."""

    def interrupt() -> None:
        wait_until(observer, "held_calls", 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield thread
    thread.join()


@pytest.mark.usefixtures("interrupter")
def test_ctrl_c_ends_a_wait_and_the_late_reply_leaves_nothing_behind(client, observer):
    handle = client.call(Op.KV_CREATE).claim()
    with pytest.raises(KeyboardInterrupt):
        client.call(Op.PRED, flags=ROWS_LAST | HOLD, handle=handle, args=(1, 0, 0, 0), payload=b"\1\0\0\0")
    assert statistics(client)["held_slots"] == 1
    observer.call(Op.PING, flags=RELEASE)
    wait_until(client, "held_slots", 0)


@pytest.mark.parametrize("is_interrupted", [True, False])
@pytest.mark.parametrize("num_forks", [0, 1, 3])
def test_files_of_a_reply_that_nobody_took_are_closed_again(client, observer, request, num_forks, is_interrupted):
    source = client.call(Op.KV_CREATE).claim()
    fork = Call(Op.KV_FORK, HOLD if is_interrupted else 0, source, (0, num_forks, 0, 0))
    if is_interrupted:
        request.getfixturevalue("interrupter")
        with pytest.raises(KeyboardInterrupt):
            client.perform(fork)
        observer.call(Op.PING, flags=RELEASE)
    else:
        client.perform(fork)
    wait_until(client, "open", [source])
    assert statistics(client)["closed"] == [source + number for number in range(1, max(num_forks, 1) + 1)]


def test_a_signal_whose_handler_returns_does_not_disturb_the_call(client, observer, request):
    seen: list[int] = []

    def note(number: int, _frame: object) -> None:
        seen.append(number)
        client_of_the_handler.call(Op.PING, flags=RELEASE)

    client_of_the_handler = request.getfixturevalue("daemon").client()
    before = signal.signal(signal.SIGINT, note)
    try:
        interrupter = request.getfixturevalue("interrupter")
        assert client.call(Op.PING, flags=HOLD, payload=b"patience").payload == b"patience"
        interrupter.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


@pytest.mark.slow
def test_a_forked_child_cannot_use_or_harm_its_parents_connection(client: ClientChannel) -> None:
    handle = client.call(Op.KV_CREATE).claim()
    held = [client.call(Op.PRED, flags=ROWS_LAST, handle=handle, args=(1, 0, 0, 0), payload=b"\7\0\0\0")]

    def is_refused_and_lets_go() -> bool:
        with pytest.raises(BadHandle, match=str(os.getppid())):
            client.call(Op.PING)
        held.clear()
        gc.collect()
        return True

    assert is_true_in_a_child(is_refused_and_lets_go)
    assert statistics(client)["held_slots"] == 1
    assert client.call(Op.PING, payload=b"mine").payload == b"mine"
