"""`--allow-net`: real namespaces, the real forwarder, real servers on loopback; only the DNS is a test's own."""

import asyncio
import errno
import logging
import os
import random
import resource
import socket
import struct
from contextlib import asynccontextmanager, suppress

import pytest

from symphony.launcher.common.grants import MAX_GRANTS, checked_grants, inside_addresses, parse_grant, shown
from symphony.launcher.common.places import Refused
from symphony.launcher.network import dialing
from symphony.launcher.network import forwarder as forwarder_module
from symphony.launcher.network import relay as relay_module
from symphony.launcher.network.forwarder import MAX_CONNECTIONS, Forwarder
from tests.symphony.launcher.network.networks import Inside, granted

NAME = ("example.test", 80)
LARGE = random.Random(7).randbytes(4 << 20)
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(autouse=True)
def backend():
    return "asyncio"


@asynccontextmanager
async def server(serve, host: str = "127.0.0.1"):
    """Yield the address of a server. `serve(reader, writer)` may end with the connection."""

    async def served(reader, writer):
        with suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()

    serving = await asyncio.start_server(served, host, 0)
    async with serving:
        yield serving.sockets[0].getsockname()[:2]


@asynccontextmanager
async def accepting():
    """Yield an address and a function that accepts a raw connection, for facts that a stream hides."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)

        async def accept():
            connection, _ = await loop.sock_accept(listening)
            connection.setblocking(False)
            return connection

        yield listening.getsockname(), accept


@asynccontextmanager
async def connected():
    """Yield a connection from inside, the server's end of it, and the network. Both ends are closed afterwards."""
    async with accepting() as (where, accept), granted(NAME, found={"example.test": [where]}) as made:
        address = made.inside.address("example.test")
        with await made.inside.connected(address, 80) as asking, await accept() as answering:
            yield asking, answering, made


async def echo(reader, writer):
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()


async def asked(inside: Inside, address: str, port: int, text: bytes = b"hello") -> bytes:
    reader, writer = await inside.streams(address, port)
    writer.write(text)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def until(found) -> None:
    while not found():  # noqa: ASYNC110 - a log and a table have no events
        await asyncio.sleep(0.005)


# How a grant is given.


GRANTS = {
    "example.com:443": ("example.com", 443),
    "Example.COM.:1": ("example.com", 1),
    "localhost:65535": ("localhost", 65535),
    "192.0.2.7:80": ("192.0.2.7", 80),
    "[2001:DB8:0::7]:80": ("2001:db8::7", 80),
    "[::ffff:192.0.2.7]:80": ("192.0.2.7", 80),
    "my_db-1:5432": ("my_db-1", 5432),
}
NO_GRANTS = {
    "no port": ("example.com", "[::1]"),
    "no number": ("example.com:", "example.com:https", "example.com:٤٤", "example.com:-1"),
    "from 1 to 65535": ("example.com:0", "example.com:65536"),
    "no single host": (":80", "*:80", "*.a.com:80", "0.0.0.0:80", "[::]:80", "224.0.0.1:80", "255.255.255.255:80"),
    "brackets": ("::1:80",),
    "no IPv6 address": ("[example.com]:80",),
    "one link": ("[fe80::1%lo]:80",),
    "URL": ("https://example.com:80",),
    "neither": (
        "a.com/24:80",
        "exa mple.com:80",
        "a.com\n:80",
        "127.1:80",
        "0x7f.0x1:80",
        "010.0.0.1:80",
        "a..b:80",
        f"{'a' * 64}.b:80",
    ),
    "xn--": ("münchen.de:80",),
}


def test_a_grant_is_a_host_and_a_port_and_what_is_none_is_refused_with_the_reason():
    for text, grant in GRANTS.items():
        assert parse_grant(text) == parse_grant(shown(grant)) == grant
    for why, texts in NO_GRANTS.items():
        for text in texts:
            with pytest.raises(Refused, match=why) as refused:
                parse_grant(text)
            assert "\n" not in str(refused.value)


def test_grants_are_counted_once_each_and_bounded():
    most = [("example.com", port) for port in range(1, MAX_GRANTS + 1)]
    assert checked_grants([*most, ("EXAMPLE.com.", 1)]) == most
    with pytest.raises(Refused, match="can have 64"):
        checked_grants([*most, ("example.com", 443)])


def test_a_name_gets_no_address_that_is_granted_by_itself():
    hosts = inside_addresses([("a.test", 1), ("127.77.0.1", 1), ("b.test", 1), ("a.test", 2)])
    assert hosts == {"a.test": ("127.77.0.2",), "127.77.0.1": ("127.77.0.1",), "b.test": ("127.77.0.3",)}


# What is inside.


MANY = [(f"10.{each}.0.1", 80) for each in range(MAX_GRANTS // 2)]
MANY += [(f"2001:db8::{each}", 80) for each in range(1, MAX_GRANTS // 2 + 1)]
SOME = [("a.test", 80), ("localhost", 8000), ("192.0.2.7", 1), ("a.test", 443), ("2001:db8::7", 65535)]
OF_SOME = [("127.77.0.1", 80), ("127.0.0.1", 8000), ("::1", 8000), ("192.0.2.7", 1), ("127.77.0.1", 443)]


@pytest.mark.parametrize(
    ("grants", "names", "listening"),
    [(SOME, "127.77.0.1 a.test\n", [*OF_SOME, ("2001:db8::7", 65535)]), (MANY, "", MANY)],
    ids=["some", "as many as there may be"],
)
def test_the_names_are_in_hosts_and_each_grant_has_a_listener(grants, names, listening):
    inside = Inside(grants)
    assert inside.hosts == "127.0.0.1 localhost\n::1 localhost\n" + names
    assert [each.getsockname()[:2] for each in inside.listening] == listening
    for each in inside.listening:
        each.close()
    inside.close()


async def test_what_is_not_granted_is_refused_at_once_and_datagrams_are_never_granted():
    async with granted(NAME, ("192.0.2.7", 80), ("2001:db8::7", 80), found={}) as made:
        for address, port, code in (
            (made.inside.address("example.test"), 81, errno.ECONNREFUSED),
            ("127.0.0.1", 80, errno.ECONNREFUSED),
            ("192.0.2.7", 443, errno.ECONNREFUSED),
            ("192.0.2.8", 80, errno.ENETUNREACH),
            ("8.8.8.8", 80, errno.ENETUNREACH),
            ("2001:db8::8", 80, errno.ENETUNREACH),
        ):
            with pytest.raises(OSError) as refused:
                await made.inside.connected(address, port)
            assert refused.value.errno == code, address
        with made.inside.new(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(("192.0.2.7", 80))
            asking.send(b"?")
            with pytest.raises(ConnectionRefusedError):
                asking.send(b"?")


# What goes through.


async def test_megabytes_go_both_ways_at_once_unharmed():
    """The port is below 1024, for an ordinary user, too."""
    uid = 65534 if os.getuid() == 0 else None
    async with server(echo) as where, granted(NAME, found={"example.test": [where]}, uid=uid) as made:
        reader, writer = await made.inside.streams(made.inside.address("example.test"), 80)
        reading = asyncio.create_task(reader.read())
        writer.write(LARGE)
        writer.write_eof()
        assert await reading == LARGE
        writer.close()


async def test_each_grant_leads_to_its_own_port_of_its_own_host_and_addresses_are_reached_at_themselves():
    async def say_port(reader, writer):
        await reader.read()
        writer.write(b"%d" % writer.get_extra_info("sockname")[1])

    async with server(say_port) as first, server(say_port) as second:
        grants = [("a.test", 80), ("b.test", 80), ("192.0.2.7", 80), ("2001:db8::7", 80), ("localhost", second[1])]
        found = {name: [first if name in ("a.test", "192.0.2.7") else second] for name, _ in grants[:-1]}
        found["localhost"] = [second]
        async with granted(*grants, found=found) as made:
            reached = [(made.inside.address(name), 80, found[name]) for name in ("a.test", "b.test")]
            reached += [(name, 80, found[name]) for name in ("192.0.2.7", "2001:db8::7")]
            reached += [(each, second[1], [second]) for each in ("127.0.0.1", "::1")]
            for address, port, [where] in reached:
                assert await asked(made.inside, address, port) == b"%d" % where[1]


async def test_each_side_may_end_its_direction_first():
    loop = asyncio.get_running_loop()
    async with connected() as (asking, answering, _):
        answering.send(b"all I have")
        answering.shutdown(socket.SHUT_WR)
        assert [await loop.sock_recv(asking, 16) for _ in range(2)] == [b"all I have", b""]
        asking.send(b"still here")
        assert await loop.sock_recv(answering, 16) == b"still here"


async def test_a_reset_is_a_reset_on_the_other_side():
    loop = asyncio.get_running_loop()
    async with accepting() as (where, accept), granted(NAME, found={"example.test": [where]}) as made:
        for breaks_inside in (True, False):
            ends = [await made.inside.connected(made.inside.address("example.test"), 80), await accept()]
            breaking, other = ends if breaks_inside else reversed(ends)
            breaking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            breaking.close()
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(other, 1)
            other.close()


async def test_what_a_server_says_before_it_resets_arrives():
    """A request that is too long has this effect: the answer comes while the request is still being sent."""
    loop = asyncio.get_running_loop()
    async with connected() as (asking, answering, _):
        sending = asyncio.create_task(loop.sock_sendall(asking, LARGE * 8))
        await loop.sock_recv(answering, 1)
        await loop.sock_sendall(answering, b"413")
        answering.close()
        assert await loop.sock_recv(asking, 16) == b"413"
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(asking, 16)
        with pytest.raises(ConnectionError):
            await sending


@pytest.mark.slow
async def test_a_side_that_does_not_read_holds_up_the_other():
    loop = asyncio.get_running_loop()
    async with connected() as (asking, answering, _):
        sending = asyncio.create_task(loop.sock_sendall(asking, LARGE * 12))
        await asyncio.wait({sending}, timeout=0.3)
        assert not sending.done()
        left = len(LARGE) * 12
        while left:
            left -= len(await loop.sock_recv(answering, 1 << 20))
        await sending


@pytest.mark.slow
async def test_more_connections_than_there_may_be_wait_for_their_turn():
    opened, most = 0, 0
    are_many = asyncio.Event()

    async def crowd(reader, writer):
        nonlocal opened, most
        opened += 1
        most = max(most, opened)
        if opened == MAX_CONNECTIONS:
            are_many.set()
        await are_many.wait()
        await echo(reader, writer)
        opened -= 1

    async with server(crowd) as where, granted(NAME, found={"example.test": [where]}) as made:
        address = made.inside.address("example.test")
        texts = [f"{each}".encode() for each in range(MAX_CONNECTIONS + 5)]
        answers = await asyncio.gather(*(asked(made.inside, address, 80, text) for text in texts))
    assert answers == texts
    assert most == MAX_CONNECTIONS


# What can't be reached.


@asynccontextmanager
async def refusing():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


@asynccontextmanager
async def silent():
    """An address where nothing answers: its queue is full."""
    with socket.socket() as listening, socket.socket() as filling:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        filling.connect(listening.getsockname())
        yield listening.getsockname()


@asynccontextmanager
async def nowhere(found):
    yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (refusing(), "Connection refused"),
        (silent(), "no answer within 0.1 s"),
        (nowhere(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), "Name or service not known"),
        (nowhere([("0.0.0.0", 80), ("::", 80)]), "its name has no address"),
    ],
    ids=["refuses", "does not answer", "no name", "no address"],
)
async def test_a_host_that_can_not_be_reached_resets_and_is_named_once(monkeypatch, caplog, target, cause):
    monkeypatch.setattr(forwarder_module, "REACH_S", 0.1)
    async with target as where, granted(NAME, found={}) as made:
        made.found["example.test"] = [where] if isinstance(where, tuple) else where
        for _ in range(2):
            reader, writer = await made.inside.streams(made.inside.address("example.test"), 80)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
    assert made.troubles == [f"example.test:80 can't be reached: {cause}"]
    assert [record.getMessage() for record in caplog.records] == made.troubles


async def test_a_connection_to_itself_is_none(monkeypatch):
    """The kernel may choose the target's own port for one, if nobody listens there: here it has to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = free.getsockname()

    async def bound(family):
        connection = socket.socket(family)
        connection.bind(where)
        return connection

    monkeypatch.setattr(dialing, "_made", bound)
    with pytest.raises(ConnectionRefusedError):
        await dialing.dial([(socket.AF_INET, socket.SOCK_STREAM, 6, "", where)])


async def test_connections_at_the_same_time_ask_for_their_name_once():
    asked_for, answers = [], asyncio.Event()

    async with server(echo) as where, granted(NAME, found={"example.test": [where]}) as made:
        found = made.resolve

        async def slow(host, port, **how):
            asked_for.append(host)
            await answers.wait()
            return await found(host, port, **how)

        made.resolve = slow
        address = made.inside.address("example.test")
        asking = [asyncio.create_task(asked(made.inside, address, 80)) for _ in range(5)]
        await until(lambda: len(made.forwarder._connections) == len(asking))
        answers.set()
        assert await asyncio.gather(*asking) == [b"hello"] * len(asking)
        assert asked_for == ["example.test"]
        assert await asked(made.inside, address, 80) == b"hello"
        assert len(asked_for) == 2


@pytest.mark.slow
async def test_the_next_address_is_tried_while_one_does_not_answer(monkeypatch):
    monkeypatch.setattr(forwarder_module, "REACH_S", 5.0)
    async with refusing() as refused, silent() as quiet, server(echo) as where, granted(NAME, found={}) as made:
        made.found["example.test"] = [refused, quiet, where]
        assert await asked(made.inside, made.inside.address("example.test"), 80) == b"hello"
        assert made.troubles == []


@pytest.mark.parametrize("left", [0, 1])
async def test_without_descriptors_a_connection_waits_until_there_are_some(left, caplog):
    """None for what arrives, or one for that and none for the connection outside."""
    loop = asyncio.get_running_loop()
    caplog.set_level(logging.WARNING)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with server(echo) as where, granted(NAME, found={"example.test": [where]}) as made:
        asking = made.inside.new(socket.AF_INET)
        asking.setblocking(False)
        free = os.dup(0)
        os.close(free)
        used = len(made.forwarder._connections)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
        try:
            await loop.sock_connect(asking, (made.inside.address("example.test"), 80))
            await until(lambda: caplog.records if left == 0 else len(made.forwarder._connections) > used)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await loop.sock_sendall(asking, b"hello")
        assert await loop.sock_recv(asking, 16) == b"hello"
        asking.close()
        assert made.troubles == []


async def test_a_listener_that_no_grant_asked_for_is_not_taken():
    listening = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(Refused, match="for which it has no grant"):
        Forwarder([NAME], print).take([listening])
    assert listening.fileno() < 0


# How it ends.


async def test_close_resets_what_is_open_and_accepts_no_more():
    loop = asyncio.get_running_loop()
    async with accepting() as (where, accept), granted(NAME, found={"example.test": [where]}) as made:
        address = made.inside.address("example.test")
        asking = await made.inside.connected(address, 80)
        answering = await accept()
        waiting = await made.inside.connected(address, 80)
        made.forwarder.close()
        for each in (asking, answering, waiting):
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(each, 1)
            each.close()
        with pytest.raises(ConnectionRefusedError):
            await made.inside.connected(address, 80)


@pytest.mark.slow
async def test_a_connection_that_a_program_closed_ends_though_its_server_keeps_it(monkeypatch):
    monkeypatch.setattr(relay_module, "LOOK_S", 0.1)
    monkeypatch.setattr(relay_module, "_KEEPALIVE", ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1)))
    async with connected() as (asking, answering, made):
        asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)  # its kernel forgets it after a second, not 60
        asking.close()
        assert await asyncio.get_running_loop().sock_recv(answering, 1) == b""
        await until(lambda: not made.forwarder._connections)
        with pytest.raises(BrokenPipeError):
            answering.send(b"!")


async def test_what_a_program_wrote_before_it_ended_goes_out():
    loop = asyncio.get_running_loop()
    async with accepting() as (where, accept), granted(NAME, found={"example.test": [where]}) as made:
        with made.inside.new(socket.AF_INET) as asking:  # at once, so that nothing is accepted in between
            asking.connect((made.inside.address("example.test"), 80))
            asking.send(b"last words")
        await made.forwarder.finish()
        with await accept() as answering:
            assert await loop.sock_recv(answering, 16) == b"last words"
            assert await loop.sock_recv(answering, 16) == b""
