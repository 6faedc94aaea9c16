"""Messages from program to program: each connection has a mailbox, and a buffer for each topic that it reads.

*A sender never waits for a reader.* A message goes into the reader's buffer. If the buffer is full, the message is
dropped. The daemon tells the sender at once (mailbox), or the reader later (topic). A topic without readers does not
exist. Buffers end with their connection. If a process has several connections, a message goes to the newest connection
that the sender may reach.

*No message is lost between two receivers.* A message is in a buffer, or in flight to one RECV. A client that gives up a
RECV sends CANCEL. If the message has been sent by then, the client has not looked at it, and the message returns to its
place in the buffer. For this, the daemon keeps the last sent messages for a while.

*The memory is bounded.* All buffers with a message share its bytes. A connection holds at most MAX_BYTES in its
mailbox, MAX_BYTES in all its topics together, and MAX_BYTES of sent messages that CANCEL can still take back. A RECV is
answered only while the connection's ring has room. So even a stopped process with a thousand threads in `recv` takes no
more memory.

The trio thread owns this state. Nothing here awaits, except the answer to a message for many readers.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import trio

from kvfs.base.alarms import Alarm, Alarms
from kvfs.pages.holdings import Kind
from libsym.abi import NO_TIMEOUT, MessageKind, Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Invalid, NoBuffers, NotFound, NotPermitted, OverQuota, SymError, TooLarge, WouldBlock
from scheduler.connection.lip import MAX_LATER, MAX_WAITS, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply

MAX_TOPIC_BYTES = 255
"""Maximum number of bytes in the name of a topic. A file's name has the same limit."""
MAX_MESSAGE_BYTES = PAYLOAD_BYTES - MAX_TOPIC_BYTES
"""Maximum number of bytes of data in a message. The data and any name of a topic fit one request. Longer data goes into
a file.
"""
MAX_MESSAGES = 1024
"""Maximum number of messages in one buffer: as many as a program may have threads or tasks."""
MAX_BYTES = 2 << 20
"""Maximum number of bytes in one buffer: two of the largest messages. The connection's ring holds as many bytes."""
MAX_TOPICS = 1024
"""Maximum number of topics that a connection reads: enough for each of its tasks."""

_KINDS = frozenset(MessageKind)
_AT_ONCE_READERS = 32
_AT_ONCE_BYTES = 1 << 20
"""Number of bytes that are copied into rings, in some 0.2 ms, before other tasks may run."""

Account: TypeAlias = tuple[int, int | None]
"""Uid, and the number of the directory that a connection is confined to. Each account has topics of its own."""


@dataclass(frozen=True, slots=True)
class Message:
    """Data of a SEND. All buffers with the message refer to one object."""

    kind: int
    sender: int
    data: bytes


@dataclass(slots=True)
class BufferBudget:
    """Bytes that a group of buffers holds together."""

    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Box:
    """A buffer: the mailbox of a connection, or its messages of one topic. Messages are numbered as they arrive."""

    lip: Lip
    topic: bytes
    """Name of the topic; empty: the buffer is the mailbox."""
    budget: BufferBudget
    messages: deque[tuple[int, Message]] = field(default_factory=deque)
    waiters: dict[SystemCall, Alarm | None] = field(default_factory=dict)
    """Waiting RECVs in order of arrival, with the alarms that end them."""
    num_lost: int = 0
    """Number of messages that were dropped since the reader was last told."""
    is_closed: bool = False
    _next_number: int = 0

    def put(self, message: Message) -> str | None:
        """Append a message. If there is no room, return the reason."""
        if len(self.messages) >= MAX_MESSAGES or self.budget.num_bytes + len(message.data) > MAX_BYTES:
            held = f"{len(self.messages)} messages, {self.budget.num_bytes} bytes"
            return f"is full ({held}): it has to receive some first"
        try:
            self.lip.holdings.hold(Kind.MESSAGE, num_bytes=len(message.data))
        except OverQuota as error:
            return f"has no memory for it: {error}"
        self.messages.append((self._next_number, message))
        self._next_number += 1
        self.budget.num_bytes += len(message.data)
        return None

    def take(self) -> tuple[int, Message]:
        """Remove the oldest message, and return it with its number."""
        number, message = self.messages.popleft()
        self.lip.holdings.let_go(Kind.MESSAGE, num_bytes=len(message.data))
        self.budget.num_bytes -= len(message.data)
        return number, message

    def put_back(self, number: int, message: Message) -> None:
        """Return a message, which was taken but not read, to its place before later messages."""
        place = 0
        while place < len(self.messages) and self.messages[place][0] < number:
            place += 1
        self.messages.insert(place, (number, message))
        self.lip.holdings.charge(Kind.MESSAGE, num_bytes=len(message.data))
        self.budget.num_bytes += len(message.data)

    def close(self) -> None:
        """Close the buffer, and drop its messages, because the reader has gone."""
        self.is_closed = True
        num_bytes = sum(len(message.data) for _number, message in self.messages)
        self.lip.holdings.let_go(Kind.MESSAGE, len(self.messages), num_bytes)
        self.budget.num_bytes -= num_bytes
        self.messages.clear()
        self.waiters.clear()


@dataclass(slots=True, eq=False)
class ConnectionBuffers:
    """The buffers of one connection."""

    account: Account
    mailbox: Box
    topics: dict[bytes, Box] = field(default_factory=dict)
    topics_budget: BufferBudget = field(default_factory=BufferBudget)
    sent: deque[tuple[SystemCall, int]] = field(default_factory=deque)
    """The last answered RECVs, each with the bytes of its message. CANCEL can still take these messages back."""
    sent_bytes: int = 0

    def boxes(self) -> list[Box]:
        return [self.mailbox, *self.topics.values()]


class Mail:
    """Answers SEND, RECV, SUBSCRIBE and UNSUBSCRIBE."""

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._readers: dict[Lip, ConnectionBuffers] = {}
        self._processes: dict[int, list[Lip]] = {}
        """Connections by process, oldest first."""
        self._topics: dict[tuple[Account, bytes], dict[Box, None]] = {}

    # Connections

    def join(self, lip: Lip) -> None:
        """Give a mailbox to a connection that is new, or has changed its identity."""
        root = lip.credentials.root
        account = lip.credentials.uid, None if root is None else root.number
        self._readers[lip] = ConnectionBuffers(account, Box(lip, b"", BufferBudget()))
        self._processes.setdefault(lip.pid, []).append(lip)

    def leave(self, lip: Lip) -> None:
        """Drop a connection's buffers with their messages. Do nothing if the connection has not joined."""
        reader = self._readers.get(lip)
        if reader is None:
            return
        for box in reader.boxes():
            self._close(reader, box)
        for call, _num_bytes in reader.sent:
            call.forget()
        lip.holdings.let_go(Kind.MESSAGE, len(reader.sent), reader.sent_bytes)
        del self._readers[lip]
        connections = self._processes[lip.pid]
        connections.remove(lip)
        if not connections:
            del self._processes[lip.pid]

    # System calls

    def table(self) -> Table:
        return {
            Op.SEND: Operation(self.send, max_waiting=MAX_LATER),
            Op.RECV: Operation(self.recv),
            Op.SUBSCRIBE: Operation(self.subscribe),
            Op.UNSUBSCRIBE: Operation(self.unsubscribe),
        }

    def send(self, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        """Send a message. args: the kind, the process (0: a topic), and the bytes of the topic's name.

        The payload begins with the topic's name.
        """
        lip, request = call.lip, call.request
        kind, pid, topic_bytes, _ = request.args
        if kind not in _KINDS:
            raise Invalid(f"there is no kind {kind} of messages")
        if not 0 <= topic_bytes <= len(request.payload) or (pid and topic_bytes):
            raise Invalid(f"a topic of {topic_bytes} bytes in a message of {len(request.payload)} to process {pid}")
        message = Message(kind, lip.pid, request.payload[topic_bytes:])
        if len(message.data) > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message of {len(message.data)} bytes: {MAX_MESSAGE_BYTES} is the most, put it into a file"
            )
        if pid:
            return self._send_to_process(lip, pid, message)
        return self._send_to_topic(lip, _topic(request.payload[:topic_bytes]), message)

    def recv(self, call: SystemCall) -> None:
        """Receive from a topic, or from the mailbox if the payload is empty.

        args[0] is the timeout in milliseconds; -1: no timeout. The answer has the message's kind, sender and data. The
        call waits until there is a message.
        """
        lip, request = call.lip, call.request
        timeout_ms = request.args[0]
        if timeout_ms < NO_TIMEOUT:
            raise Invalid(f"a timeout of {timeout_ms} ms: give 0 or more, or -1 to wait for ever")
        reader = self._readers[lip]
        box = self._subscribe(lip, reader, request.payload) if request.payload else reader.mailbox
        if timeout_ms == 0 and not box.messages and not box.num_lost:
            raise WouldBlock(f"there is no message in {_name(box)}")
        if len(box.messages) <= len(box.waiters):  # otherwise the call gets a message now
            call.check_may_wait(MAX_WAITS)
        call.wait(partial(self._end, box, call, errno.ECANCELED, "recv() was cancelled"))
        box.waiters[call] = None
        if timeout_ms > 0:
            no_message = f"no message came to {_name(box)} in {timeout_ms} ms"
            time_out = partial(self._end, box, call, errno.EWOULDBLOCK, no_message)
            box.waiters[call] = self._alarms.set(timeout_ms / 1000, time_out)
        self._hand_over(box)

    def subscribe(self, call: SystemCall) -> Reply:
        """Begin to collect messages of a topic for this connection."""
        self._subscribe(call.lip, self._readers[call.lip], call.request.payload)
        return Reply()

    def unsubscribe(self, call: SystemCall) -> Reply:
        """Stop reading a topic, and end the RECVs that wait for it. Do nothing if the connection does not read it."""
        reader = self._readers[call.lip]
        box = reader.topics.get(_topic(call.request.payload))
        if box is not None:
            for waiting in tuple(box.waiters):
                self._end(box, waiting, errno.EINTR, f"the wait was ended: {_name(box)} was unsubscribed meanwhile")
            self._close(reader, box)
        return Reply()

    # Parts

    def _send_to_process(self, lip: Lip, pid: int, message: Message) -> Reply:
        box = self._readers[self._addressee(lip, pid)].mailbox
        why = box.put(message)
        if why is not None:
            raise WouldBlock(f"the mailbox of process {pid} {why}")
        self._hand_over(box)
        return Reply((1,))

    def _addressee(self, lip: Lip, pid: int) -> Lip:
        """Return the newest of a process's connections that the sender may reach."""
        account = self._readers[lip].account
        reaches_all = account == (0, None)
        connections = self._processes.get(pid, ())
        for other in reversed(connections):
            if reaches_all or self._readers[other].account == account:
                return other
        if connections and lip.credentials.root is None:
            raise NotPermitted(f"process {pid} is another account's: uid {lip.credentials.uid} can't send to it")
        raise NotFound(f"no program with pid {pid} is connected")

    def _send_to_topic(self, lip: Lip, topic: bytes, message: Message) -> Reply | Coroutine[Any, Any, Reply]:
        """Put a message into all buffers, and answer waiting readers. A coroutine answers many readers."""
        boxes = self._topics.get((self._readers[lip].account, topic), {})
        num_reached, waiting = 0, list[Box]()
        for box in boxes:
            if box.put(message) is not None:
                box.num_lost += 1
                continue
            num_reached += 1
            if box.waiters:
                waiting.append(box)
        if len(waiting) > _AT_ONCE_READERS or len(waiting) * len(message.data) > _AT_ONCE_BYTES:
            return self._hand_over_to_many(waiting, len(message.data), num_reached)
        for box in waiting:
            self._hand_over(box)
        return Reply((num_reached,))

    async def _hand_over_to_many(self, boxes: Sequence[Box], num_bytes: int, num_reached: int) -> Reply:
        """Hand a message to many waiting readers, even if the sender ends meanwhile: the message is already in their
        buffers.
        """
        a_turn = min(_AT_ONCE_READERS, max(1, _AT_ONCE_BYTES // max(1, num_bytes)))
        with trio.CancelScope(shield=True):
            for first in range(0, len(boxes), a_turn):
                for box in boxes[first : first + a_turn]:
                    self._hand_over(box)
                await trio.lowlevel.checkpoint()
        return Reply((num_reached,))

    def _hand_over(self, box: Box) -> None:
        """Answer waiting calls while there are messages, and room in the ring. The other calls wait on."""
        channel = box.lip.channel
        while box.waiters and (box.messages or box.num_lost):
            if channel.num_waiting_replies:
                channel.when_room[box] = partial(self._hand_over, box)
                return
            call = next(iter(box.waiters))
            if box.num_lost:
                num_lost, box.num_lost = box.num_lost, 0
                why = f"{num_lost} messages of {_name(box)} were lost: its buffer was full, receive more often"
                self._end(box, call, errno.ENOBUFS, why)
                continue
            self._stop_waiting(box, call)
            number, message = box.take()
            call.answer(Reply((message.kind, message.sender), message.data))
            call.when_cancelled(partial(self._take_back, box, number, message))
            self._remember(self._readers[box.lip], call, len(message.data))

    @staticmethod
    def _remember(reader: ConnectionBuffers, call: SystemCall, num_bytes: int) -> None:
        """Keep the answered RECV for a while, because CANCEL may return its message. Forget the oldest RECVs."""
        holdings = call.lip.holdings
        holdings.charge(Kind.MESSAGE, num_bytes=num_bytes)
        reader.sent.append((call, num_bytes))
        reader.sent_bytes += num_bytes
        while len(reader.sent) > MAX_MESSAGES or (reader.sent_bytes > MAX_BYTES and len(reader.sent) > 1):
            oldest, num_bytes = reader.sent.popleft()
            holdings.let_go(Kind.MESSAGE, num_bytes=num_bytes)
            reader.sent_bytes -= num_bytes
            oldest.forget()

    def _take_back(self, box: Box, number: int, message: Message) -> None:
        if not box.is_closed:
            box.put_back(number, message)
            self._hand_over(box)

    def _end(self, box: Box, call: SystemCall, code: int, why: str) -> None:
        """End a RECV with an error."""
        self._stop_waiting(box, call)
        call.answer(SymError(why, code))

    def _stop_waiting(self, box: Box, call: SystemCall) -> None:
        alarm = box.waiters.pop(call)
        if alarm is not None:
            self._alarms.cancel(alarm)

    def _subscribe(self, lip: Lip, reader: ConnectionBuffers, payload: bytes) -> Box:
        topic = _topic(payload)
        box = reader.topics.get(topic)
        if box is None:
            if len(reader.topics) >= MAX_TOPICS:
                raise NoBuffers(f"this program reads {MAX_TOPICS} topics already: unsubscribe() from some")
            lip.holdings.hold(Kind.TOPIC)
            box = reader.topics[topic] = Box(lip, topic, reader.topics_budget)
            self._topics.setdefault((reader.account, topic), {})[box] = None
        return box

    def _close(self, reader: ConnectionBuffers, box: Box) -> None:
        for call in tuple(box.waiters):
            self._stop_waiting(box, call)
            call.drop()
        box.close()
        box.lip.channel.when_room.pop(box, None)
        if box.topic:
            box.lip.holdings.let_go(Kind.TOPIC)
            del reader.topics[box.topic]
            readers = self._topics[reader.account, box.topic]
            del readers[box]
            if not readers:
                del self._topics[reader.account, box.topic]


def _topic(name: bytes) -> bytes:
    if not 1 <= len(name) <= MAX_TOPIC_BYTES:
        raise Invalid(f"a topic's name has 1 to {MAX_TOPIC_BYTES} bytes, not {len(name)}")
    try:
        name.decode()
    except UnicodeDecodeError:
        raise Invalid(f"the topic {name.decode(errors='replace')} is no UTF-8") from None
    return name


def _name(box: Box) -> str:
    return f"the topic {box.topic.decode()}" if box.topic else "the mailbox"
