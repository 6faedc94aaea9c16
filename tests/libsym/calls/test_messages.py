"""Messages, advice and lines of input on the program's side: the requests on the wire, and the possible replies."""

import json
import os
import struct
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import libsym as sym
from libsym.abi import RANGE_END, Advice, MessageKind, Op
from libsym.calls.faces import script_of
from libsym.calls.kv import _read as read_script
from libsym.calls.open_file import length_script
from libsym.calls.user import Lines

advise_script = script_of(sym.kv_advise)
recv_script = script_of(sym.recv)
send_script = script_of(sym.send)
subscribe_script = script_of(sym.subscribe)


def answered(script: Any, args: tuple[int, ...] = (0, 0, 0, 0), payload: bytes = b"") -> Any:
    next(script)
    with pytest.raises(StopIteration) as over:
        script.send(SimpleNamespace(args=list(args), payload=payload, claim=int))
    return over.value.value


@pytest.mark.parametrize(
    ("x", "kind", "data"),
    [
        ("text \u20ac", MessageKind.TEXT, "text \u20ac".encode()),
        ("", MessageKind.TEXT, b""),
        (b"\xff\x00", MessageKind.BYTES, b"\xff\x00"),
        (bytearray(b"x"), MessageKind.BYTES, b"x"),
        (memoryview(b"x"), MessageKind.BYTES, b"x"),
        ({"a": [1, None, 2.5, "\u20ac"]}, MessageKind.JSON, b'{"a": [1, null, 2.5, "\\u20ac"]}'),
        (True, MessageKind.JSON, b"true"),
        (None, MessageKind.JSON, b"null"),
    ],
)
def test_a_message_arrives_as_what_it_was(x: object, kind: MessageKind, data: bytes) -> None:
    call = next(send_script(7, x))
    assert (call.op, call.args, call.payload) == (Op.SEND, (kind, 7, 0, 0), data)
    arrived = answered(recv_script(), (kind, 42), data)
    assert arrived == x
    assert type(arrived) is (bytes if kind is MessageKind.BYTES else type(x))
    call = next(send_script("\u20ac", x))
    assert (call.args, call.payload) == ((kind, 0, 3, 0), "\u20ac".encode() + data)


def test_a_recv_says_how_long_it_may_take() -> None:
    assert next(recv_script()).args[0] == -1
    assert [next(recv_script(timeout=seconds)).args[0] for seconds in (0, 0.0001, 1, 1.5)] == [0, 1, 1000, 1500]
    assert next(recv_script("t", timeout=0)).payload == b"t"


NAN, INF = float("nan"), float("inf")
SENT: list[tuple[Any, Any]] = [
    *((to, "x") for to in (0, -1, 1 << 31, True, 1.5, "", "\udcff")),
    *((7, what) for what in ("\udcff", {1, 2}, NAN)),
]
TIMEOUTS: list[Any] = [-1, NAN, INF, "1"]
OTHERS: list[Any] = [(recv_script, ""), (subscribe_script, 7), (advise_script, "a.kv", 7)]


@pytest.mark.parametrize(
    "begin",
    [
        *(partial(send_script, *each) for each in SENT),
        *(partial(recv_script, timeout=seconds) for seconds in TIMEOUTS),
        *(partial(*each) for each in OTHERS),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(begin: Callable[[], Any]) -> None:
    with pytest.raises(sym.Invalid) as caught:
        next(begin())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "data"), [(0, b"\xff"), (2, b"{"), (2, b"\xff"), (2, b"[" * 100_000), (3, b"x"), (-1, b"x")]
)
def test_a_message_of_a_liar_is_an_error_that_names_the_sender(kind: int, data: bytes) -> None:
    script = recv_script()
    next(script)
    with pytest.raises(sym.ProtocolError, match="process 42"):
        script.send(SimpleNamespace(args=[kind, 42, 0, 0], payload=data, claim=int))  # type: ignore[arg-type]


def test_advice_goes_over_in_one_call() -> None:
    call = next(advise_script("a\udcff.kv", sym.TTL(0.0015), sym.PIN, sym.PRIORITY(-5)))
    pieces = struct.pack("=6q", Advice.TTL, 2, Advice.PIN, 0, Advice.PRIORITY, -5)
    assert (call.op, call.args[0], call.payload) == (Op.KV_ADVISE, 3, pieces + b"a\xff.kv")
    for seconds in (-1, float("nan"), float("inf"), "1"):
        with pytest.raises(sym.Invalid):
            sym.TTL(seconds)  # type: ignore[arg-type]


def test_usage_of_a_newer_daemon_is_read_as_far_as_it_is_known() -> None:
    payload = json.dumps({"calls": 3, "page_seconds": 0.5, "new": 1}).encode()
    assert answered(script_of(sym.getrusage)(), (42,), payload) == sym.Usage(calls=3, page_seconds=0.5)
    assert answered(script_of(sym.getpid)(), (42,), payload) == 42


def test_lines_come_one_by_one_however_they_are_cut() -> None:
    reading, writing = os.pipe()
    lines = Lines()
    assert lines.next_nowait(reading) is None
    os.write(writing, b"one\r\n\ntw")
    assert [lines.next(reading), lines.next(reading), lines.next_nowait(reading)] == ["one", "", None]
    os.write(writing, "o \u20ac\nend".encode())
    os.close(writing)
    assert [lines.next(reading), lines.next_nowait(reading)] == ["two \u20ac", "end"]
    for _ in range(2):
        with pytest.raises(EOFError):
            lines.next(reading)
    os.close(reading)


def test_threads_that_read_lines_share_them() -> None:
    reading, writing = os.pipe()
    lines, found = Lines(), list[str]()
    threads = [threading.Thread(target=lambda: found.append(lines.next(reading))) for _ in range(20)]
    for thread in threads:
        thread.start()
    os.write(writing, b"".join(b"%d\n" % number for number in range(20)))
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == list(range(20))
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("wanted", "first", "count"),
    [((-1, None), RANGE_END, 0), ((5, 8), 5, 3), ((5, 5), 5, 1), ((5, None), 5, 0), ((5, -1), 5, 0)],
)
def test_a_read_asks_for_no_more_than_it_gives(wanted: tuple[int, int | None], first: int, count: int) -> None:
    """A read from the end on first asks for the length alone; a count of 0 means all entries that follow."""
    kv: Any = SimpleNamespace(handle=3)
    call = next(read_script(kv, *wanted))
    assert (call.op, call.handle, call.args[:2]) == (Op.KV_READ, 3, (first, count))
    assert next(length_script(kv)).args[:2] == (RANGE_END, 0)
