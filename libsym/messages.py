"""Messages between programs: to one of them, or to everybody who reads a topic."""

from __future__ import annotations

import json
from typing import Any

from libsym.abi import MessageKind, Op
from libsym.arguments import shown, utf8, wait_ms
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid, ProtocolError
from libsym.faces import system_call


@system_call
def send(to: int | str, x: object) -> Script[int]:
    """Sends `x` to a program, by its pid, or to all that read a topic; gives how many it reached.

    Text, bytes, and what JSON can say arrive as what they were (so a tuple arrives as a list). The sender never waits
    for a reader. Of a program, the message is in its mailbox when this returns: up to 1,024 messages and 2 MiB, then it
    is WouldBlock. Of a topic, each reader has a buffer as large; one that is full loses the message, and the reader
    learns of it. What is sent to a topic that nobody reads is gone: 0.

    Programs reach those of their own user, inside of one domain if they are confined to it; root's reach every pid.
    Topics belong to the user, or to the domain. A program that has several connections gets what is sent to its pid
    on the newest. Buffers go with the connection.

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
    """The next message in this program's mailbox, or of a topic, which it reads from then on.

    Waits until there is one, or `timeout` seconds, and then fails with WouldBlock; 0 does not wait. Each message goes
    to one `recv`, in the order in which they came. If messages of a topic were lost because its buffer was full, one
    `recv` fails with NoBuffers, which says how many, and the next go on. A wait that Ctrl-C or a cancellation ends
    takes no message away.

    >>> sym.send(sym.getpid(), b"bytes stay bytes")
    1
    >>> sym.recv(timeout=1)
    b'bytes stay bytes'
    """
    reply = yield Call(Op.RECV, args=(wait_ms(timeout), 0, 0, 0), payload=b"" if topic is None else _topic(topic))
    reply.claim()  # until here, whatever ends the call gives the message back
    return _decoded(reply.args[0], reply.args[1], reply.payload)


@system_call
def subscribe(topic: str) -> Script[None]:
    """Reads a topic from now on: what is sent to it is kept for `recv(topic)`.

    A `recv` of the topic does it, too; this is for not missing what is sent before the first.

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
    """Reads a topic no longer: what is left of it is dropped, and a `recv` that waits for it fails with EINTR.

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
    """What a message was. The sender may be any program of the account: it need not have used this library."""
    try:
        if kind == MessageKind.BYTES:
            return data
        return data.decode() if kind == MessageKind.TEXT else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of process {sender} is not what it says it is: {error}") from error


def _topic(name: str) -> bytes:
    if not name:
        raise Invalid("a topic needs a name")
    return utf8(name, "a topic")
