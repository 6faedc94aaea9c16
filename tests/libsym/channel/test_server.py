"""The daemon's half against clients that break every rule."""

import errno
import gc
import mmap
import os
import struct
import weakref
from collections.abc import Iterator

import pytest

from libsym import abi
from libsym._channel import ffi, lib
from libsym.channel.handshake import check_greeting, refusal
from libsym.channel.server import MAX_OPEN, MAX_TAKEN, ServerChannel
from libsym.errors import Invalid, NoBuffers, ProtocolError, SymError, TooLarge

# Offsets in struct sym_region, as a client in another language would use them.
SUBMIT_TAIL, COMPLETE_HEAD, COMPLETE_TAIL, BACKLOG = 128, 192, 320, 388
SUBMIT_RING = 8192
COMPLETE_RING = SUBMIT_RING + abi.RING_BYTES


class Client:
    """A client without manners: it writes what it likes where it likes."""

    def __init__(self, vocab_size: int = 16) -> None:
        self.server = ServerChannel.create(vocab_size)
        self.region = mmap.mmap(self.server.fds[0], 0)

    def write(self, offset: int, value: int) -> None:
        struct.pack_into("=Q", self.region, offset, value)

    def submit(self, raw: bytes, tail: int | None = None) -> None:
        self.region[SUBMIT_RING : SUBMIT_RING + len(raw)] = raw
        self.write(SUBMIT_TAIL, len(raw) if tail is None else tail)

    def close(self) -> None:
        self.server.close()
        self.region.close()


@pytest.fixture
def client() -> Iterator[Client]:
    found = Client()
    yield found
    found.close()


def frame(payload: bytes = b"", *, op: int = abi.Op.PING, size: int | None = None, zero: int = 0) -> bytes:
    header = struct.pack("=IHHIIQQ4q", 64 + len(payload) if size is None else size, op, 0, 0, zero, 7, 0, 1, 2, 3, 4)
    return header + payload + bytes(-len(payload) % 64)


def test_a_region_stays_near_its_limit_and_holds_a_useful_number_of_rows() -> None:
    for vocab_size, num_slots in [(256, 1024), (49152, 319), (262_144, 64)]:
        channel = ServerChannel.create(vocab_size)
        assert channel.num_slots == num_slots
        assert len(channel.row(num_slots - 1)) == vocab_size
        channel.close()
    with pytest.raises(Invalid):
        ServerChannel.create(0)


def test_an_idle_connection_costs_little_memory() -> None:
    """The region is 64 MiB of addresses; only what was touched is there."""
    channel = ServerChannel.create(49_152)
    row = channel.row(channel.take_rows(1))
    row[:] = memoryview(bytes(4 * 49_152)).cast("f")
    channel.reply(1, payload=b"x")
    found = os.fstat(channel.fds[0])
    assert found.st_size > 60 << 20
    assert found.st_blocks * 512 < 512 << 10
    channel.close()


def test_requests_come_out_as_they_were_written(client: Client) -> None:
    client.submit(frame(b"abc") + frame(op=abi.Op.STAT))
    assert not client.server.arm()
    first, second = client.server.receive()
    assert (first.op, first.id, first.args, first.payload) == (abi.Op.PING, 7, (1, 2, 3, 4), b"abc")
    assert second.op is abi.Op.STAT
    assert client.server.receive() == []
    assert client.server.arm()


def test_a_bounded_receive_leaves_the_rest_for_the_next_and_nothing_that_was_taken_can_be_changed(client):
    client.submit(frame(b"good") + frame(b"fine") + frame(b"last"))
    requests = client.server.receive(2)
    client.submit(3 * frame(b"evil"), tail=384)
    assert [request.payload for request in requests] == [b"good", b"fine"]
    assert not client.server.arm()
    assert [request.payload for request in client.server.receive(2)] == [b"last"]
    assert client.server.arm()


@pytest.mark.parametrize("size", [0, 63, 128, abi.MAX_FRAME_BYTES + 1, 2**32 - 1, None])
def test_a_malformed_frame_is_refused_for_good(client: Client, size: int | None) -> None:
    client.submit(frame(zero=1) if size is None else frame(size=size))  # what is reserved is zero
    for _ in range(2):
        with pytest.raises(ProtocolError):
            client.server.receive()
    client.server.reply(1, payload=b"nobody reads this")  # the gate may still answer earlier calls
    with pytest.raises(ProtocolError):
        client.server.arm()


@pytest.mark.parametrize("op", [0, 999, 2**16 - 1])
def test_an_operation_that_there_is_not_is_answered_with_ENOSYS_and_its_neighbours_are_served(client, op):
    client.submit(frame(b"1") + frame(b"2", op=op) + frame(b"3"))
    assert [request.payload for request in client.server.receive()] == [b"1", b"3"]
    size, code, call_id = struct.unpack_from("=IiQ", client.region, COMPLETE_RING)
    assert (code, call_id) == (errno.ENOSYS, 7)
    text = client.region[COMPLETE_RING + 64 : COMPLETE_RING + size].decode()
    assert text == f"this daemon has no operation {op}: it is of another release than the program's libsym"


@pytest.mark.parametrize("tail", [1, 63, abi.RING_BYTES + 64, 2**63, 2**64 - 64])
def test_a_tail_outside_the_ring_is_refused(client: Client, tail: int) -> None:
    client.submit(frame(), tail=tail)
    with pytest.raises(ProtocolError):
        client.server.receive()


@pytest.mark.parametrize("head", [64, abi.RING_BYTES + 64, 2**63, 2**64 - 64 - abi.RING_BYTES])
def test_a_wild_head_of_the_replies_ends_the_connection_but_no_reply_raises(client: Client, head: int) -> None:
    client.write(COMPLETE_HEAD, head)
    client.server.reply(1)
    with pytest.raises(ProtocolError):
        client.server.receive()


def test_replies_that_find_no_room_wait_in_order(client: Client) -> None:
    for number in range(1, 11):
        client.server.reply(number, payload=bytes(500_000))
    assert client.server.num_waiting_replies == 6
    assert client.region[BACKLOG] == 1
    (tail,) = struct.unpack_from("=Q", client.region, COMPLETE_TAIL)
    client.write(COMPLETE_HEAD, tail)
    client.server.receive()
    assert client.server.num_waiting_replies == 2
    ids = [
        struct.unpack_from("=Q", client.region, COMPLETE_RING + (tail + i * 500_096) % abi.RING_BYTES + 8)[0]
        for i in range(4)
    ]
    assert ids == [5, 6, 7, 8]


def test_requests_that_are_not_answered_are_bounded(client: Client) -> None:
    client.submit(frame() * (2 * MAX_OPEN))
    taken = []
    while received := client.server.receive():
        taken += received
    assert MAX_OPEN - 2 * MAX_TAKEN < len(taken) <= MAX_OPEN
    assert client.server.is_full
    for request in taken[: 2 * MAX_TAKEN]:
        client.server.reply(request.id, more=True)
    assert client.server.receive() == [], "they are not over"
    for request in taken[: 2 * MAX_TAKEN]:
        client.server.reply(request.id)
    assert client.server.receive()


def test_an_answer_that_nobody_will_look_at_takes_no_room(client: Client) -> None:
    client.server.reply(0, payload=b"closed")
    assert struct.unpack_from("=Q", client.region, COMPLETE_TAIL) == (0,)


def test_who_holds_replies_back_is_told_when_none_waits_any_more(client: Client) -> None:
    told = []

    def go_on() -> None:
        told.append(client.server.num_waiting_replies)
        client.server.reply(99)

    client.server.when_room[client] = go_on
    for number in range(1, 6):
        client.server.reply(number, payload=bytes(500_000))
    assert told == []
    (tail,) = struct.unpack_from("=Q", client.region, COMPLETE_TAIL)
    client.write(COMPLETE_HEAD, tail)
    client.server.arm()
    assert told == [0], "whichever call finds the room"
    assert struct.unpack_from("=Q", client.region, COMPLETE_TAIL)[0] == tail + 500_096 + 64


def test_a_client_that_never_reads_is_not_served_without_end(client: Client) -> None:
    for number in range(20):
        client.server.reply(number, payload=bytes(500_000))
    client.submit(frame())
    assert client.server.receive() == []
    assert client.server.arm()  # and the daemon sleeps meanwhile, it does not spin
    (tail,) = struct.unpack_from("=Q", client.region, COMPLETE_TAIL)
    for _ in range(5):
        client.write(COMPLETE_HEAD, tail)
        received = client.server.receive()
        (tail,) = struct.unpack_from("=Q", client.region, COMPLETE_TAIL)
        if received:
            break
    assert [request.id for request in received] == [7]


def test_rows_are_taken_lowest_first_and_given_back(client: Client) -> None:
    server = client.server
    assert [server.take_rows(2), server.take_rows(3), server.take_rows(1)] == [0, 2, 5]
    server.free_rows(2, 3)
    assert [server.take_rows(4), server.take_rows(1), server.take_rows(2)] == [6, 2, 3]
    assert server.num_held_slots == 2 + 1 + 4 + 1 + 2
    with pytest.raises(TooLarge, match="1025 rows"):
        server.take_rows(server.num_slots + 1)
    with pytest.raises(NoBuffers):
        server.take_rows(server.num_slots)


def test_a_row_stays_mapped_after_the_channel_was_closed() -> None:
    """A step may still write into it when the client has hung up."""
    server = ServerChannel.create(16)
    row = server.row(server.take_rows(1))
    server.close()
    server.reply(1, payload=b"too late")
    del server
    row[:] = memoryview(struct.pack("16f", *range(16))).cast("f")
    assert row[15] == 15.0


def test_the_doorbell_is_emptied_even_if_the_client_made_it_blocking(client: Client) -> None:
    doorbell = client.server.doorbell
    os.set_blocking(doorbell, True)
    client.server.clear_doorbell()
    os.eventfd_write(doorbell, 3)
    client.server.clear_doorbell()
    os.set_blocking(doorbell, False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(doorbell)


def test_the_greeting_is_checked() -> None:
    good = struct.pack("=IIQ", abi.MAGIC, abi.ABI_VERSION, 0)
    assert check_greeting(good) == abi.ABI_VERSION
    for bad, why in [
        (b"", "0 bytes"),
        (struct.pack("=IIQ", 1, abi.ABI_VERSION, 0), "does not speak"),
        (struct.pack("=IIQ", abi.MAGIC, 99, 0), "version 99"),
    ]:
        with pytest.raises(ProtocolError, match=why):
            check_greeting(bad)
    assert b"no room" in refusal(SymError("no room"))


# What a loop over steps takes out of the ring itself


def decode_frame(token: int = 3, *, handle: int = 5) -> bytes:
    """A pred() of one token, as a decode loop makes it."""
    payload = struct.pack("=i", token)
    return (
        struct.pack("=IHHIIQQ4q", 64 + 4, abi.Op.PRED, 0, abi.ROWS_LAST, 0, 7, handle, 1, 0, 0, 0) + payload + bytes(60)
    )


def take_hot(memory: tuple[object, object], *, stop: int = 0, handle: int = 5) -> int:
    found = ffi.new("sym_hot_call *")
    return int(lib.sym_server_take_hot(memory[0], handle, 0, ffi.new("int *", stop), found))


def test_a_loop_takes_the_call_that_it_waits_for_unless_it_was_stopped_and_is_lent_its_slot(client: Client) -> None:
    client.submit(decode_frame())
    assert take_hot(client.server.memory, handle=6) == lib.SYM_HOT_OTHER
    assert take_hot(client.server.memory, stop=1) == 0, "what it was stopped for comes first"
    assert [take_hot(client.server.memory), take_hot(client.server.memory)] == [1, 0]
    assert client.server.num_lent_slots == 1
    assert lib.sym_server_answer_hot(client.server.memory[0], 7, 0, 1) == 0
    assert client.server.num_lent_slots == 0
    assert client.server.num_held_slots == 1, "it is the client's"


def test_a_loops_answer_that_finds_no_room_leaves_the_slot_lent(client: Client) -> None:
    client.submit(decode_frame())
    assert take_hot(client.server.memory) == 1
    for _ in range(3):
        client.server.reply(8, (), bytes(1_000_000))
    assert lib.sym_server_answer_hot(client.server.memory[0], 7, 0, 1) == 1
    assert client.server.num_lent_slots == 1
    client.server.reply(7, (0, 1, 1), num_rows=1)
    assert client.server.num_lent_slots == 0, "though the answer waits for room"


def test_a_loop_takes_nothing_while_earlier_calls_are_with_the_gate(client: Client) -> None:
    client.submit(frame())
    assert [request.op for request in client.server.receive()] == [abi.Op.PING]
    client.submit(frame() + decode_frame(), tail=64 + len(decode_frame()))
    assert take_hot(client.server.memory) == 0
    assert [request.op for request in client.server.receive()] == [abi.Op.PRED]
    assert client.server.receive() == []
    client.submit(frame() + 2 * decode_frame(), tail=64 + 2 * len(decode_frame()))
    assert take_hot(client.server.memory) == 1


def test_a_loop_takes_nothing_of_a_client_that_is_gone(client: Client) -> None:
    """A reply would ring a bell that is closed: by then the number may be another file's."""
    memory = client.server.memory
    client.submit(decode_frame())
    client.server.close()
    assert take_hot(memory) == 0


def test_a_closed_channel_lets_its_owner_go():
    """Else each connection that has gone waits for the collector, and for good where it was older than a collection."""

    class Owner:
        channel = ServerChannel.create(16)

        def made_room(self):
            """Do nothing when the ring has room again."""

    owner = Owner()
    owner.channel.when_room[owner] = owner.made_room
    owner.channel.close()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
