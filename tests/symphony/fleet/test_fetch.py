"""Files of peers: two file systems in one process, real TLS between them, and a fake decoder."""

import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.names.inode import Credentials
from libsym.errors import Exists, Invalid, NoAccess, NotFound, NotSupported, OverQuota, ProtocolError, SymError
from symphony.fleet.client import Peers
from symphony.fleet.keys import make_keys
from symphony.fleet.link import KEY, Copy, contexts, offer_of
from symphony.fleet.server import MAX_STRANGERS, PeerServer
from tests.symphony.fleet.machines import USER, Machine

LENGTH, NUM_FULL = 100, 3


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, ["east", "west"])
    return directory


@pytest.fixture
def east(tmp_path: Path) -> Machine:
    """A machine with a file of three full pages and a part of one."""
    machine = Machine(tmp_path, "east")
    file = machine.fs.kv_create(USER, "a.kv")
    machine.append(file, range(LENGTH))
    machine.fs.kv_close(file)
    return machine


async def refuse(_request: Copy) -> None:
    raise NotSupported("this test has no versions")


@pytest.fixture
def west(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "west")


@asynccontextmanager
async def linked(keys: Path, east: Machine, west: Machine) -> AsyncIterator[tuple[Peers, trio.CancelScope]]:
    """Serve the files of `east` until the scope is cancelled, and connect `west` to them."""
    bound, serving = socket.create_server(("127.0.0.1", 0)), trio.CancelScope()
    server = PeerServer(east.fs, contexts(keys / "east")[0], bound, lambda: None, refuse)

    async def serve() -> None:
        with serving:
            await server.run()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield Peers(west.fs, {"east": bound.getsockname()[:2]}, contexts(keys / "west")[1]), serving
            serving.cancel()
    for machine in (east, west):
        machine.fs.check()


async def begins(condition: Callable[[], bool]) -> None:
    """Wait until workers, which ring no bell, have begun."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.001)


async def test_a_fetched_file_has_the_entries_of_the_peers_file_and_goes_on(keys, east, west):
    async with linked(keys, east, west) as (peers, _):
        file = await peers.fetch(USER, "east", "a.kv", "b.kv", 0o640)
        source = east.fs.kv_open(USER, "a.kv", write=False)
        assert [each.tolist() for each in file.table.read()] == [each.tolist() for each in source.table.read()]
        assert west.values(file) == east.values(source)
        assert (file.inode.uid, file.inode.mode) == (USER.uid, 0o640)
        west.append(file, range(7))
        assert west.values(file)[:LENGTH] == east.values(source)
        assert file.content.marks == ()


async def test_pages_that_the_user_has_already_do_not_cross_the_network(keys, east, west):
    counts = []
    async with linked(keys, east, west) as (peers, _):
        for user in (USER, USER, Credentials(0, 0)):  # pages are shared within one account alone
            await peers.fetch(user, "east", "a.kv", None, 0o600)
            counts.append(peers.num_pages_received)
        source = east.fs.kv_open(USER, "a.kv", write=True)
        east.append(source, range(32))
        await peers.fetch(USER, "east", "a.kv", None, 0o600)
        counts.append(peers.num_pages_received)
    assert counts == [NUM_FULL, NUM_FULL, 2 * NUM_FULL, 2 * NUM_FULL + 1]


async def test_a_peer_gets_the_file_as_it_was_when_it_asked(keys, east, west):
    async with linked(keys, east, west) as (peers, _):
        east.store.worker_page_s = 0.02  # the server's workers read while the file changes
        source = east.fs.kv_open(USER, "a.kv", write=True)
        before = east.values(source)

        async def change() -> None:
            await begins(lambda: east.store.num_worker_pages > 0)
            east.fs.kv_truncate(source, 40)
            east.append(source, range(500, 520))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            file = await peers.fetch(USER, "east", "a.kv", None, 0o600)
        assert west.values(file) == before


@pytest.mark.parametrize(("mine", "theirs", "marks"), [("x", "x", ()), ("x", "y", (("y", LENGTH),))])
async def test_entries_of_another_instruction_set_are_marked(keys, tmp_path, mine, theirs, marks):
    east, west = Machine(tmp_path, "e", bits=theirs), Machine(tmp_path, "w", bits=mine)
    file = east.fs.kv_create(USER, "a.kv")
    east.append(file, range(LENGTH))
    async with linked(keys, east, west) as (peers, _):
        assert (await peers.fetch(USER, "east", "a.kv", None, 0o600)).content.marks == marks


REFUSALS: dict[str, tuple[Credentials, str, str, str | None, type[SymError], str]] = {
    "an unknown peer": (USER, "north", "a.kv", None, NotFound, "peers of this daemon: east"),
    "no such file": (USER, "east", "none.kv", None, NotFound, "east: none.kv"),
    "a file of another user": (Credentials(2000, 2000), "east", "a.kv", None, NoAccess, "east: a.kv"),
    "a plain file": (USER, "east", "plain", None, Invalid, "not a KV file"),
    "a name that is taken": (USER, "east", "a.kv", "here.kv", Exists, "the name is taken"),
}


@pytest.mark.parametrize(("creds", "peer", "path", "new", "error", "words"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_says_who_refuses_and_leaves_nothing(keys, east, west, creds, peer, path, new, error, words):
    root = east.fs.volume.tree.root
    east.fs.volume.make_plain(root, b"plain", 0o644, USER.uid, USER.gid)
    west.fs.kv_close(west.fs.kv_create(USER, "here.kv"))
    async with linked(keys, east, west) as (peers, _):
        with pytest.raises(error, match=words):
            await peers.fetch(creds, peer, path, new, 0o600)
    assert west.fs.pool.num_free == 16


async def test_a_fetch_needs_a_quota_and_the_peers_model(keys, east, tmp_path):
    small = Machine(tmp_path, "small", quota=2 * east.store.page_bytes)
    other = Machine(tmp_path, "other", model="another")
    for west, error, words in ((small, OverQuota, "quota"), (other, Invalid, "image is of model")):
        async with linked(keys, east, west) as (peers, _):
            with pytest.raises(error, match=words):
                await peers.fetch(USER, "east", "a.kv", None, 0o600)
        assert west.fs.pool.num_free == 16


async def test_a_page_that_changes_on_its_way_is_refused(keys, east, west):
    async with linked(keys, east, west) as (peers, _):
        file = east.fs.kv_open(USER, "a.kv", write=False)
        east.fs.pool.digests_of(file.table.pages[:NUM_FULL])
        east.store.pages[east.fs.pool.store.of[file.table.pages[1]], 0, 0, 0, 0] += 1
        with pytest.raises(Invalid, match="damaged"):
            await peers.fetch(USER, "east", "a.kv", None, 0o600)
    assert west.fs.pool.num_free == 16


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_side_that_ends_in_the_middle_leaves_nothing(keys, east, west, side):
    east.store.worker_page_s = 0.02
    fetching = trio.CancelScope()

    async def fetch(peers: Peers) -> None:
        with fetching, pytest.raises(SymError, match="no connection to east") if side == "server" else nullcontext():
            await peers.fetch(USER, "east", "a.kv", None, 0o600)

    async with linked(keys, east, west) as (peers, serving), trio.open_nursery() as nursery:
        nursery.start_soon(fetch, peers)
        await begins(lambda: west.fs.pool.num_free < 16)
        (serving if side == "server" else fetching).cancel()
    assert west.fs.pool.num_free == 16


async def test_only_a_daemon_of_the_same_authority_and_of_that_name_is_a_peer(keys, east, west, tmp_path):
    make_keys(tmp_path / "others", ["west", "east"])
    async with linked(keys, east, west) as (peers, _):
        address = peers._addresses["east"]
        strangers = (
            Peers(west.fs, {"east": address}, contexts(tmp_path / "others" / "west")[1]),
            Peers(west.fs, {"north": address}, contexts(keys / "west")[1]),
        )
        for stranger, name in zip(strangers, ("east", "north"), strict=True):
            with pytest.raises(SymError, match="certificate verify failed"):
                await stranger.fetch(USER, name, "a.kv", None, 0o600)
        context = ssl.create_default_context(cafile=str(keys / "ca.pem"))  # a client without a certificate

        def talk() -> bytes:
            plain = socket.create_connection(address, 5)
            with plain, suppress(OSError), context.wrap_socket(plain, server_hostname="east") as tls:
                tls.sendall(b"\2\0\0\0{}")
                return tls.recv(1)
            return b""

        assert await trio.to_thread.run_sync(talk) == b""


def message(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


MALFORMED = [
    *(b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\2\0\0\0[]{"),
    *map(message, (b"null", b"{}", b"{", b'{"errno": "x"}', b'{"errno": [], "message": ""}', b"[" * 100_000)),
    message(b'{"path": "a.kv", "uid": 1000, "gid": 1000, "groups": ["x"]}'),
]


async def test_malformed_requests_end_their_connection_alone(keys, east, west):
    client = contexts(keys / "west")[1]
    async with linked(keys, east, west) as (peers, _):

        def send(data: bytes) -> None:
            with (
                socket.create_connection(peers._addresses["east"], 5) as plain,
                client.wrap_socket(plain, server_hostname="east") as tls,
            ):
                tls.sendall(data)

        for data in MALFORMED:
            await trio.to_thread.run_sync(send, data)
        assert (await peers.fetch(USER, "east", "a.kv", None, 0o600)).table.length == LENGTH


def test_keys_that_others_may_read_or_that_are_missing_are_refused(keys, tmp_path):
    make_keys(tmp_path, ["east"])
    with pytest.raises(Exists):
        make_keys(tmp_path, ["north", "east"])
    with pytest.raises(Invalid, match="no name for a daemon"):
        make_keys(tmp_path, ["../north"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem", "east"]
    (tmp_path / "east" / KEY).chmod(0o640)
    with pytest.raises(Invalid, match="0600"):
        contexts(tmp_path / "east")
    (tmp_path / "east" / KEY).unlink()
    with pytest.raises(Invalid, match="symphony-fleet"):
        contexts(tmp_path / "east")


CODES: list[Any] = ["x", [], 0, 1 << 70]
MARKS: list[Any] = [[1], [["a"]], [["a", 1, 2]], [["", 1]] * 2000]
OFFERS: list[dict[str, Any]] = [
    *({"errno": code, "message": "no"} for code in CODES),
    *({"size": 1, "header_bytes": 8, "marks": marks} for marks in MARKS),
    {"size": 1, "header_bytes": 1 << 40, "marks": []},
    {},
]


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: str(offer)[:40])
def test_a_malformed_offer_is_refused(offer):
    with pytest.raises(ProtocolError, match="east offered"):
        offer_of(offer, "east")


async def test_strangers_that_say_nothing_hold_up_no_peer(keys, east, west):
    async with linked(keys, east, west) as (peers, _):
        with ExitStack() as strangers:
            for _ in range(MAX_STRANGERS + 6):
                strangers.enter_context(socket.create_connection(peers._addresses["east"], 5))
            with trio.fail_after(4):  # a stranger has five seconds to show a certificate
                assert (await peers.fetch(USER, "east", "a.kv", None, 0o600)).table.length == LENGTH
