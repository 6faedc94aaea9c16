"""Messages between programs: to one program, or to all readers of a topic."""

from __future__ import annotations

import json
from typing import Any

from libsym.abi import MessageKind, Op
from libsym.arguments import shown, utf8, wait_ms
from libsym.calls.faces import system_call
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid, ProtocolError


@system_call
def send(to: int | str, x: object) -> Script[int]:
    """Send `x` to a program, by its pid, or to all readers of a topic; return the number of receivers.

    Text, bytes and JSON values arrive with their type; a tuple arrives as a list. The sender never waits for a reader.

    To a pid: the message is in the program's mailbox when the call returns. A mailbox holds 1,024 messages and 2 MiB.
    WouldBlock: the mailbox is full.
    To a topic: each reader has a buffer of the same size. If the buffer is full, the message is lost, and the reader's
    next `recv` says so. If the topic has no reader, the message is dropped, and the call returns 0.

    A program reaches the programs of its own user, or of its domain if it is confined to a domain. Root's programs
    reach every pid. Topics belong to the user, or to the domain. If a program has several connections, messages to its
    pid arrive on the newest. The buffers of a connection end with it.

    >>> sym.send(sym.getpid(), {"question": 42})
    1
    >>> sym.recv()
    {'question': 42}
    >>> sym.send("a topic that nobody reads", "hello")
    0
    """
    kind, data = _encoded(x)
    if isinstance(to, str):
        topic = _topic(to)
        call = Call(Op.SEND, args=(kind, 0, len(topic), 0), payload=topic + data)
    elif isinstance(to, int) and not isinstance(to, bool) and 0 < to < 1 << 31:
        call = Call(Op.SEND, args=(kind, to, 0, 0), payload=data)
    else:
        raise Invalid(f"send() takes a pid or the name of a topic, not {shown(to)}")
    reply = yield call
    return reply.args[0]


@system_call
def recv(topic: str | None = None, *, timeout: float | None = None) -> Script[Any]:
    """Return the next message from this program's mailbox, or from a topic. The first `recv` of a topic subscribes.

    The call waits for a message. WouldBlock: no message arrived within `timeout` seconds. `timeout=0` does not wait.
    Each message goes to one `recv`, in the order of arrival. NoBuffers: messages of the topic were lost because its
    buffer was full. The error says how many, and the next `recv` returns the next message. If Ctrl-C or a cancellation
    ends the wait, no message is lost.

    >>> sym.send(sym.getpid(), b"bytes stay bytes")
    1
    >>> sym.recv(timeout=1)
    b'bytes stay bytes'
    """
    reply = yield Call(Op.RECV, args=(wait_ms(timeout), 0, 0, 0), payload=b"" if topic is None else _topic(topic))
    reply.claim()  # if the call ends before this line, the message returns to the queue
    return _decoded(reply.args[0], reply.args[1], reply.payload)


@system_call
def subscribe(topic: str) -> Script[None]:
    """Subscribe to a topic: from now on its messages are kept for `recv(topic)`.

    The first `recv` of a topic subscribes, too. Call `subscribe` to get messages that are sent before that `recv`.

    >>> sym.subscribe("news")
    >>> sym.send("news", "first")
    1
    >>> sym.recv("news")
    'first'
    >>> sym.unsubscribe("news")
    """
    yield Call(Op.SUBSCRIBE, payload=_topic(topic))


@system_call
def unsubscribe(topic: str) -> Script[None]:
    """Unsubscribe from a topic: its messages are dropped, and a `recv` that waits for the topic fails with EINTR.

    >>> sym.subscribe("news")
    >>> sym.unsubscribe("news")
    >>> sym.send("news", "to nobody")
    0
    """
    yield Call(Op.UNSUBSCRIBE, payload=_topic(topic))


def _encoded(x: object) -> tuple[MessageKind, bytes]:
    if isinstance(x, str):
        return MessageKind.TEXT, utf8(x, "a message")
    if isinstance(x, (bytes, bytearray, memoryview)):
        return MessageKind.BYTES, bytes(x)
    try:
        text = json.dumps(x, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"send() takes text, bytes, or what JSON can say: {error}") from error
    return MessageKind.JSON, text.encode()


def _decoded(kind: int, sender: int, data: bytes) -> Any:
    """Return the value of a message. ProtocolError: its data are malformed, perhaps from a program without libsym."""
    try:
        if kind == MessageKind.BYTES:
            return data
        return data.decode() if kind == MessageKind.TEXT else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of process {sender} is malformed: {error}") from error


def _topic(name: str) -> bytes:
    if not name:
        raise Invalid("a topic needs a name")
    return utf8(name, "a topic")
