"""Messages at the gate: recipients, kept messages, lost ones, and senders that no reader holds up."""

import errno
from collections import deque
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.base.alarms import Alarms
from kvfs.names.inode import Credentials, Inode
from kvfs.pages.holdings import WEIGHTS, Holdings, Kind
from libsym.abi import MessageKind, Op
from libsym.channel.server import Request
from libsym.errors import Invalid, NoBuffers, NotFound, NotPermitted, TooLarge, WouldBlock
from scheduler.connection.lip import MAX_WAITS, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.messages import MAX_BYTES, MAX_MESSAGE_BYTES, MAX_MESSAGES, MAX_TOPIC_BYTES, MAX_TOPICS, Mail

TEXT = MessageKind.TEXT
ANN, BOB, ROOT = 1000, 1001, 0


class Ring:
    """Takes the place of a channel: replies wait in it while it is full."""

    def __init__(self):
        self.replies = []
        """(request, errno, sender, data) as the program sees them."""
        self.is_full = False
        self.waiting = deque[tuple]()
        self.when_room = {}

    @property
    def num_waiting_replies(self):
        return len(self.waiting)

    def reply(self, request_id, args=(), payload=b"", error=None, *, num_rows=0):
        said = (request_id, 0, args[1], payload) if error is None else (request_id, error.errno, 0, str(error))
        (self.waiting if self.is_full else self.replies).append(said)

    def read(self):
        """The program reads everything, and makes room."""
        self.is_full = False
        self.replies += self.waiting
        self.waiting.clear()
        held_back, self.when_room = self.when_room, {}
        for go_on in held_back.values():
            go_on()


class Post:
    """Connections, and the mail between them."""

    def __init__(self):
        self.mail = Mail(Alarms())
        self._next_request = 1

    def join(self, pid, uid=ANN, root=None):
        ring: Any = Ring()
        lip = Lip(pid, Credentials(uid, uid, frozenset(), root), ring)
        self.mail.join(lip)
        return lip

    def call(self, lip, op, args, payload=b""):
        self._next_request += 1
        return SystemCall(lip, Request(op, 0, self._next_request, 0, (*args, 0, 0, 0, 0)[:4], payload))

    def send(self, lip, to, data):
        topic = b"" if isinstance(to, int) else to.encode()
        args = (TEXT, to if isinstance(to, int) else 0, len(topic))
        outcome: Any = self.mail.send(self.call(lip, Op.SEND, args, topic + data))
        if not hasattr(outcome, "args"):
            outcome = trio.run(lambda: outcome)
        return outcome.args[0]

    def recv(self, lip, topic="", timeout_ms=-1):
        """The number of the request: its reply is in the ring sooner or later."""
        call = self.call(lip, Op.RECV, (timeout_ms,), topic.encode())
        self.mail.recv(call)
        return call.request.id

    def got(self, lip, topic=""):
        """Return all messages for a program, taken one by one."""
        found = list[bytes]()
        while True:
            try:
                number = self.recv(lip, topic, 0)
            except WouldBlock:
                return found
            (reply,) = [each for each in lip.channel.replies if each[0] == number]
            found.append(reply[3])

    def subscribe(self, lip, topic):
        self.mail.subscribe(self.call(lip, Op.SUBSCRIBE, (), topic.encode()))

    def unsubscribe(self, lip, topic):
        self.mail.unsubscribe(self.call(lip, Op.UNSUBSCRIBE, (), topic.encode()))


def cancel(lip, number):
    """Cancel a call as CANCEL does at the gate."""
    ended = lip.calls.get(number)
    if ended is not None:
        ended.cancel()


@pytest.fixture
def post():
    return Post()


def domain(number):
    nobody: Any = None
    return Inode(number, 0o040000, 0o700, ANN, ANN, nobody)


# ---- one to one


def test_messages_to_a_process_wait_in_its_mailbox_in_order_and_go_to_whoever_waits(post):
    one, other = post.join(1), post.join(2)
    assert [post.send(one, 2, b"%d" % number) for number in range(3)] == [1, 1, 1]
    assert post.send(other, 2, b"to myself") == 1
    assert post.got(other) == [b"0", b"1", b"2", b"to myself"]
    assert post.got(one) == []
    other.channel.replies.clear()
    waits = [post.recv(other), post.recv(other)]
    for number, data in zip(waits, (b"a", b"b"), strict=True):
        post.send(one, 2, data)
        assert other.channel.replies[-1] == (number, 0, 1, data), "its sender is told, too"
    assert other.num_later == 0


def test_a_full_mailbox_refuses_at_once_and_keeps_what_it_has(post):
    one, other = post.join(1), post.join(2)
    for number in range(MAX_MESSAGES):
        post.send(one, 2, b"%d" % number)
    with pytest.raises(WouldBlock, match="mailbox of process 2 is full"):
        post.send(one, 2, b"too much")
    assert len(post.got(other)) == MAX_MESSAGES
    large = bytes(MAX_MESSAGE_BYTES)
    for _ in range(MAX_BYTES // MAX_MESSAGE_BYTES):
        post.send(one, 2, large)
    with pytest.raises(WouldBlock):
        post.send(one, 2, large)
    assert post.got(other) == [large, large]
    assert post.send(one, 2, b"room again") == 1


def test_a_mailbox_whose_user_has_no_memory_left_says_so_and_can_be_read(post):
    one, other = post.join(1), post.join(2)
    other.charge_to(Holdings(lambda: "ann", limit_bytes=WEIGHTS[Kind.CONNECTION] + WEIGHTS[Kind.MESSAGE] + 10))
    post.send(one, 2, b"0123456789")
    with pytest.raises(WouldBlock, match="mailbox of process 2 has no memory for it: ann is at its quota of"):
        post.send(one, 2, b"")
    assert post.got(other) == [b"0123456789"]


REFUSED = [
    *((Op.SEND, args, b"xy", Invalid) for args in ((9, 2, 0), (-1, 2, 0), (TEXT, 2, 1), (TEXT, 0, 99), (TEXT, 0, -1))),
    (Op.SEND, (TEXT, 0, 0), b"xy", Invalid),
    (Op.SEND, (TEXT, 2, 0), bytes(MAX_MESSAGE_BYTES + 1), TooLarge),
    (Op.SEND, (TEXT, 99, 0), b"x", NotFound),
    (Op.SUBSCRIBE, (), b"t" * (MAX_TOPIC_BYTES + 1), Invalid),
    (Op.SUBSCRIBE, (), b"\xff", Invalid),
    (Op.RECV, (-2,), b"", Invalid),
]


@pytest.mark.parametrize(("op", "args", "payload", "error"), REFUSED)
def test_what_makes_no_sense_is_refused(post, op, args, payload, error):
    one, other = post.join(1), post.join(2)
    begin = {Op.SEND: post.mail.send, Op.SUBSCRIBE: post.mail.subscribe, Op.RECV: post.mail.recv}[op]
    with pytest.raises(error):
        begin(post.call(one, op, args, payload))
    assert post.got(other) == []


def test_a_process_with_several_connections_gets_its_mail_on_the_newest(post):
    sender, old, new = post.join(1), post.join(2), post.join(2)
    post.send(sender, 2, b"a")
    assert (post.got(old), post.got(new)) == ([], [b"a"])
    post.mail.leave(new)
    post.send(sender, 2, b"b")
    assert post.got(old) == [b"b"]
    other_user = post.join(2, BOB)
    post.send(sender, 2, b"c")
    assert (post.got(old), post.got(other_user)) == ([b"c"], [])


# ---- who reaches whom


def test_programs_reach_those_of_their_own_user_and_root_reaches_all(post):
    ann, bob, root = post.join(1, ANN), post.join(2, BOB), post.join(3, ROOT)
    for sender, pid in ((ann, 2), (bob, 1), (ann, 3)):
        with pytest.raises(NotPermitted):
            post.send(sender, pid, b"x")
    assert [post.send(root, pid, b"from root") for pid in (1, 2, 3)] == [1, 1, 1]
    assert [post.got(lip) for lip in (ann, bob, root)] == [[b"from root"]] * 3
    post.subscribe(ann, "t")
    post.subscribe(bob, "t")
    assert post.send(bob, "t", b"x") == 1, "a topic is the user's own"
    assert (post.got(ann, "t"), post.got(bob, "t")) == ([], [b"x"])


def test_confined_connections_reach_their_own_domain_alone(post):
    one, other = domain(10), domain(11)
    inside, beside = post.join(1, ANN, one), post.join(2, ANN, one)
    outside, elsewhere, root_inside = post.join(3, ANN), post.join(4, ANN, other), post.join(5, ROOT, one)
    assert post.send(inside, 2, b"x") == 1
    for sender, pid in ((inside, 3), (inside, 4), (elsewhere, 1), (root_inside, 3), (root_inside, 1)):
        with pytest.raises(NotFound):
            post.send(sender, pid, b"x")
    with pytest.raises(NotPermitted):
        post.send(outside, 1, b"x")
    for lip in (inside, beside, outside, elsewhere):
        post.subscribe(lip, "t")
    assert post.send(inside, "t", b"y") == 2
    assert post.send(outside, "t", b"z") == 1
    assert post.send(elsewhere, "t", b"w") == 1
    assert [post.got(lip, "t") for lip in (inside, beside, outside, elsewhere)] == [[b"y"], [b"y"], [b"z"], [b"w"]]


# ---- topics


def test_a_topic_reaches_all_that_read_it_and_one_that_nobody_reads_costs_nothing(post):
    sender, readers = post.join(1), [post.join(pid) for pid in range(2, 102)]
    assert post.send(sender, "t", b"before") == 0
    assert not post.mail._topics
    for reader in readers:
        post.subscribe(reader, "t")
    waiting, data = {reader: post.recv(reader, "t") for reader in readers[:50]}, b"shared" * 1000
    assert post.send(sender, "t", data) == 100
    for reader, number in waiting.items():
        assert reader.channel.replies == [(number, 0, 1, data)]
    found = [post.got(reader, "t") for reader in readers[50:]]
    assert found == [[data]] * 50
    assert all(each[0] is found[0][0] for each in found), "all buffers share its bytes"
    for reader in readers:
        post.mail.leave(reader)
    assert not post.mail._topics


def test_a_recv_of_a_topic_subscribes_and_an_unsubscribe_ends_its_wait(post):
    sender, reader = post.join(1), post.join(2)
    number = post.recv(reader, "t")
    assert len(post.mail._topics) == 1
    post.unsubscribe(reader, "t")
    assert [(each[0], each[1]) for each in reader.channel.replies] == [(number, errno.EINTR)]
    assert post.send(sender, "t", b"x") == 0
    assert reader.num_later == 0
    post.unsubscribe(reader, "t")  # a second time does nothing


def test_a_reader_that_is_slow_loses_messages_is_told_once_and_holds_nobody_up(post):
    sender, slow, quick = post.join(1), post.join(2), post.join(3)
    post.subscribe(slow, "t")
    for number in range(MAX_MESSAGES + 7):
        post.recv(quick, "t")
        assert post.send(sender, "t", b"%d" % number) == (2 if number < MAX_MESSAGES else 1)
    found = post.got(slow, "t")
    assert "7 messages of the topic t were lost" in found[0]
    assert found[1:] == [b"%d" % number for number in range(MAX_MESSAGES)]
    assert len(quick.channel.replies) == MAX_MESSAGES + 7


def test_one_connection_reads_so_many_topics_and_holds_so_many_bytes_of_them(post):
    sender, reader = post.join(1), post.join(2)
    for number in range(MAX_TOPICS):
        post.subscribe(reader, f"t{number}")
    with pytest.raises(NoBuffers):
        post.subscribe(reader, "one more")
    reached = [post.send(sender, f"t{number}", bytes(1 << 16)) for number in range(MAX_TOPICS)]
    assert sum(reached) << 16 == MAX_BYTES
    post.send(sender, 2, b"the mailbox has room of its own")
    assert len(post.got(reader)) == 1


# ---- waits that end


def test_a_wait_ends_with_its_timeout_and_takes_nothing(post):
    async def main():
        sender, reader = post.join(1), post.join(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post.mail._alarms.run)
            number = post.recv(reader, timeout_ms=500)
            in_time = post.recv(reader, "t", timeout_ms=500)
            await trio.sleep(0.4)
            post.send(sender, "t", b"just in time")
            assert reader.channel.replies == [(in_time, 0, 1, b"just in time")]
            await trio.sleep(0.2)
            assert [each[:2] for each in reader.channel.replies[1:]] == [(number, errno.EWOULDBLOCK)]
            post.send(sender, 2, b"late")
            nursery.cancel_scope.cancel()
        assert post.got(reader) == [b"late"]
        assert reader.num_later == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_cancelled_wait_takes_no_message_also_behind_its_answer(post):
    sender, reader = post.join(1), post.join(2)
    number = post.recv(reader)
    cancel(reader, number)
    assert [each[:2] for each in reader.channel.replies] == [(number, errno.ECANCELED)]
    for data in (b"a", b"b", b"c", b"d"):
        post.send(sender, 2, data)
    for number in [post.recv(reader) for _ in range(3)]:  # what it was sent, it has not looked at
        cancel(reader, number)
    assert post.got(reader) == [b"a", b"b", b"c", b"d"], "each is where it was"
    first = post.recv(reader, "t")
    post.send(sender, "t", b"x")
    second = post.recv(reader, "t")
    cancel(reader, first)
    assert reader.channel.replies[-2:] == [(first, 0, 1, b"x"), (second, 0, 1, b"x")], "it goes to whoever waits"


def test_what_was_sent_is_kept_for_a_while_only(post):
    sender, reader = post.join(1), post.join(2)
    numbers = []
    for _ in range(3 * MAX_MESSAGES):
        numbers.append(post.recv(reader))
        post.send(sender, 2, b"x")
    assert len(reader.calls) == MAX_MESSAGES
    for _ in range(10):
        post.recv(reader)
        post.send(sender, 2, bytes(MAX_MESSAGE_BYTES))
    assert len(reader.calls) == 2, "large ones for less long"
    cancel(reader, numbers[0])
    assert post.got(reader) == []


async def test_a_program_has_so_many_waits_and_when_it_goes_they_stay_silent_and_its_buffers_go(post):
    sender, reader = post.join(1), post.join(2)
    post.send(sender, 2, b"x")
    post.recv(reader, "t", timeout_ms=1000)
    for _ in range(MAX_WAITS - 1):
        post.recv(reader, "t")
    with pytest.raises(WouldBlock):
        post.recv(reader, "t")
    post.mail.leave(reader)
    assert (reader.channel.replies, reader.num_later, reader.calls) == ([], 0, {})
    assert len(post.mail._alarms) == 0
    with pytest.raises(NotFound):
        post.send(sender, 2, b"x")
    assert post.send(sender, "t", b"x") == 0
    assert post.got(post.join(2)) == []


# ---- rings that are full


def test_a_stopped_process_with_many_waits_takes_no_more_than_its_ring_and_its_buffers(post):
    sender, stopped, other = post.join(1), post.join(2), post.join(3)
    numbers = [post.recv(stopped) for _ in range(20)]
    stopped.channel.is_full = True
    part = bytes(MAX_BYTES // 4)
    sent = sum(post.send(sender, 2, part) for _ in range(5))
    with pytest.raises(WouldBlock):
        post.send(sender, 2, part)
    assert stopped.channel.num_waiting_replies == 1
    assert post.send(sender, 3, b"x") == 1, "nobody else is held up"
    assert post.got(other) == [b"x"]
    stopped.channel.read()
    assert [each[0] for each in stopped.channel.replies] == numbers[:sent]
    assert stopped.channel.when_room == {}


def test_many_readers_of_a_large_message_are_served_in_turns_though_its_sender_goes(post):
    sender, readers = post.join(1), [post.join(pid) for pid in range(2, 102)]
    for reader in readers:
        post.recv(reader, "t")
    turns = 0

    async def main():
        rest = post.mail.send(post.call(sender, Op.SEND, (TEXT, 0, 1), b"t" + bytes(1 << 19)))

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as others:
            others.start_soon(count)
            async with trio.open_nursery() as its_own:
                its_own.start_soon(lambda: rest)
                await trio.lowlevel.checkpoint()
                its_own.cancel_scope.cancel()
            others.cancel_scope.cancel()

    trio.run(main)
    assert turns > 10
    assert all(len(reader.channel.replies) == 1 for reader in readers)
