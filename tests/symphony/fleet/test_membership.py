"""The client of etcd and the list of machines, on a real etcd."""

import json
import math
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer, ThreadingTCPServer

import pytest
import trio
import trio.testing

from libsym.abi import MAX_FRAME_BYTES
from libsym.errors import Exists, Invalid, SymError, TimedOut
from symphony.fleet.etcd import MAX_ANSWER_BYTES, Etcd, Record
from symphony.fleet.keys import make_keys
from symphony.fleet.link import contexts, require_name
from symphony.fleet.membership import MAX_MACHINES, MAX_RECORD_BYTES, RENEW_S, Load, Machine, Membership, machine_of
from tests.symphony.etcd import EtcdServer

EAST = Machine("10.0.0.1:7313", "state of east", "tiny", {"model": "a", "layout": "b"}, "avx", 1 << 20, 1_700_000_000)
LOAD = Load(3, 15_360, 512, 1_048_576)
WEST = replace(EAST, address="10.0.0.2:7313", state="state of west", bits="amx", identity={"model": "a", "layout": "c"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def client() -> Iterator[Callable[..., Etcd]]:
    """Function that makes a client. The test closes it at its end."""
    with ExitStack() as stack:

        def make(*urls: str, context: ssl.SSLContext | None = None) -> Etcd:
            etcd = Etcd(urls, context)
            stack.callback(etcd.close)
            return etcd

        yield make


@pytest.fixture
def etcd(server: EtcdServer, client: Callable[..., Etcd]) -> Etcd:
    return client(server.url)


def fleet_of(request: pytest.FixtureRequest) -> str:
    return request.node.name.partition("[")[0].replace("_", "-")[:60]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that rings no bell."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


# The client


@contextmanager
def answering(text: bytes) -> Iterator[int]:
    """Run a server that gives every request the same answer. Yields the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, running(server) as port:
        yield port


@contextmanager
def dripping(first: bytes, again: bytes) -> Iterator[int]:
    """Run a server that answers each connection with `first`, and then with `again` for ever. If that is empty, the
    connection ends. Yields the port.
    """

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                self.request.recv(65536)
                self.request.sendall(first)
                while again:
                    self.request.sendall(again)
                    time.sleep(0.02)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server, running(server) as port:
        yield port


@contextmanager
def running(server: TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()


NO_ANSWERS: list[object] = ["", 1, [], {}, {"header": 1}, {"result": []}, {"code": "x", "message": 1}]
NO_RECORDS: list[object] = [
    *(1, "x", [1], [{}], [{"mod_revision": "x"}], [{"mod_revision": math.inf}]),
    [{"key": "/w==", "mod_revision": "1"}],
]
ANSWERS: list[tuple[object, str]] = [
    *((each, "no etcd") for each in NO_ANSWERS),
    *(({"header": {}, "kvs": each}, "malformed records") for each in NO_RECORDS),
    ({"header": {}, "padding": "x" * MAX_ANSWER_BYTES}, "an answer of more than"),
    ({"code": 14, "message": "etcdserver: no leader"}, "etcd does not answer .*no leader"),
    ({"code": 7, "message": "permission denied"}, "etcd refuses: permission denied"),
]


@pytest.mark.parametrize(("answer", "words"), ANSWERS, ids=[str(answer)[:50] for answer, _ in ANSWERS])
def test_a_malformed_answer_is_an_error_and_the_next_one_counts(client, answer, words):
    with answering(json.dumps(answer).encode()) as port:
        etcd = client(f"http://127.0.0.1:{port}")
        for _ in range(2):
            with pytest.raises(SymError, match=words):
                etcd.read("e/")


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("first", "again"),
    [(b"", b"H"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (OK + b"Content-Length: 999\r\n\r\n", b" "),
     (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n")],
)  # fmt: skip
def test_an_answer_that_never_ends_takes_no_longer_than_silence(client, monkeypatch, first, again):
    monkeypatch.setattr("symphony.fleet.etcd.LIMIT_S", 0.2)
    monkeypatch.setattr("symphony.fleet.etcd.MIN_ATTEMPT_S", 0.2)
    with dripping(first, again) as port, pytest.raises(TimedOut, match="no answer in time"):
        client(f"http://127.0.0.1:{port}").read("e/")


def test_a_chunk_of_negative_size_takes_no_memory_without_end(client):
    first = OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n"
    with dripping(first, b"x" * (1 << 20)) as port, pytest.raises(TimedOut, match="an answer without end"):
        client(f"http://127.0.0.1:{port}").read("e/")


@pytest.mark.parametrize(
    ("said", "words"), [(OK + b"Content-Length: 9\r\n\r\n{}", "a part of an answer"), (b"x" * 60_000, "x{120}")]
)
def test_a_strange_answer_has_a_short_message(client, said, words):
    with dripping(said, b"") as port, pytest.raises(TimedOut, match=rf"etcd does not answer \(\S+: {words}\)$"):
        client(f"http://127.0.0.1:{port}").read("e/")


@pytest.mark.parametrize("number", [b"[]", b'"soon"', b"1e999"])
def test_a_malformed_lease_is_an_error(client, number):
    with answering(b'{"header": {}, "ID": %b, "TTL": %b}' % (number, number)) as port:
        etcd = client(f"http://127.0.0.1:{port}")
        for request in (etcd.grant, etcd.renew):
            with pytest.raises(SymError, match="malformed"):
                request(7)


def test_a_lease_without_a_number_is_an_error(client):
    with answering(b'{"header": {}}') as port, pytest.raises(SymError, match="etcd sent the lease 0"):
        client(f"http://127.0.0.1:{port}").grant(7)


@pytest.mark.slow
def test_a_record_is_written_only_over_the_revision_that_was_seen(etcd):
    assert etcd.put("a/1", b"x\0\xff", 0, 0)
    assert not etcd.put("a/1", b"y", 0, 0)
    (record,) = etcd.read("a/")
    assert (record.key, record.value, record.lease) == ("a/1", b"x\0\xff", 0)
    assert etcd.put("a/1", b"", 0, record.revision)
    assert not etcd.put("a/1", b"z", 0, record.revision)
    assert etcd.put("a0", b"behind the prefix", 0, 0)
    assert [each.value for each in etcd.read("a/")] == [b""]


def test_a_record_ends_with_its_lease(etcd):
    lease = etcd.grant(60)
    assert etcd.put("b/1", b"x", lease, 0)
    assert etcd.read("b/")[0].lease == lease
    assert etcd.renew(lease)
    etcd.revoke(lease)
    assert etcd.read("b/") == []
    assert not etcd.renew(lease)
    with pytest.raises(SymError, match=r"etcd refuses: .*lease not found"):
        etcd.put("b/1", b"x", lease, 0)


@pytest.mark.slow
def test_an_endpoint_that_is_down_silent_or_no_etcd_is_passed_over(server, client, monkeypatch):
    monkeypatch.setattr("symphony.fleet.etcd.LIMIT_S", 1.0)
    monkeypatch.setattr("symphony.fleet.etcd.MIN_ATTEMPT_S", 0.2)
    with answering(b"<html>") as other, socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            ports = gone.getsockname()[1], silent.getsockname()[1], other
        bad = [*(f"http://127.0.0.1:{port}" for port in ports), f"http://{'a' * 64}:1"]
        etcd = client(*bad, server.url)
        assert etcd.read("nothing/") == []
        assert etcd.urls == [server.url, *bad]
        with pytest.raises(TimedOut) as raised:
            client(*bad).read("nothing/")
    for url, why in zip(
        bad, ("Connection refused", "no answer in time", "no etcd, but HTTP 200: <html>", "enc"), strict=True
    ):
        assert f"{url}: {why}" in str(raised.value)


@pytest.mark.slow
def test_requests_go_on_when_etcd_was_killed_and_is_back(client, tmp_path):
    server = EtcdServer(tmp_path)
    try:
        etcd = client(server.url)
        etcd.put("c/1", b"x", 0, 0)
        server.kill()
        with pytest.raises(TimedOut, match=f"{server.url}: Connection refused"):
            etcd.read("c/")
        server.start()
        assert [each.value for each in etcd.read("c/")] == [b"x"]
    finally:
        server.kill()


@pytest.mark.slow
def test_etcd_and_its_clients_show_each_other_certificates(client, tmp_path):
    make_keys(tmp_path / "keys", ["etcd=127.0.0.1", "east"])
    make_keys(tmp_path / "others", ["east"])
    of_etcd = tmp_path / "keys" / "etcd"
    files = ("--cert-file", of_etcd / "machine.pem", "--key-file", of_etcd / "machine.key")
    trusted = ("--client-cert-auth", "--trusted-ca-file", of_etcd / "ca.pem")
    server = EtcdServer(tmp_path, *map(str, files + trusted), scheme="https")
    try:
        etcd = client(server.url, context=contexts(tmp_path / "keys" / "east")[1])
        assert etcd.put("d/1", b"x", 0, 0)
        assert [each.value for each in etcd.read("d/")] == [b"x"]
        with pytest.raises(TimedOut, match="certificate: "):
            client(server.url, context=contexts(tmp_path / "others" / "east")[1]).read("d/")
        with pytest.raises(TimedOut, match=r"Remote end closed connection|Connection reset"):
            client(server.url.replace("https", "http")).read("d/")
    finally:
        server.kill()


# Machines


async def test_machines_of_a_fleet_find_each_other_and_disappear_when_they_leave(etcd, request):
    fleet = fleet_of(request)
    east, west = Membership(etcd, fleet, "east", lambda: EAST), Membership(etcd, fleet, "west", lambda: WEST)
    looking = Membership(etcd, fleet, "north", lambda: replace(EAST, address=""))
    elsewhere = Membership(etcd, f"{fleet}-2", "east", lambda: WEST)
    for each in (elsewhere, east, west, looking):
        await each.join()
    assert west.addresses == {"east": ("10.0.0.1", 7313)}
    assert sorted(looking.addresses) == ["east", "west"]
    machines = west.info()["machines"]
    assert {name: each["differs"] for name, each in machines.items()} == {"east": ["layout", "bits"], "west": []}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(west.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await east.join()
    assert east.addresses == {}


@pytest.mark.slow
async def test_a_machine_that_renews_nothing_disappears(etcd, request, monkeypatch):
    monkeypatch.setattr("symphony.fleet.membership.TTL_S", 1)  # etcd makes it two
    monkeypatch.setattr("symphony.fleet.membership.RENEW_S", 0.1)
    east = Membership(etcd, fleet_of(request), "east", lambda: EAST)
    west = Membership(etcd, fleet_of(request), "west", lambda: WEST)
    await west.join()
    await east.join()
    assert sorted(east.addresses) == ["west"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(east.run)
        await until(lambda: not east.addresses)
        assert list(east.info()["machines"]) == ["east"]
        nursery.cancel_scope.cancel()


def test_rounds_of_a_slow_etcd_follow_without_a_pause():
    clock, is_third, num_read = trio.testing.MockClock(), threading.Event(), 0

    class Slow(Etcd):
        def read(self, prefix: str) -> list[Record]:
            nonlocal num_read
            num_read += 1
            if num_read == 3:
                is_third.set()
            else:
                trio.from_thread.run_sync(clock.jump, RENEW_S)
            return []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Membership(Slow([], None), "f", "east", lambda: replace(EAST, address="")).run)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(RENEW_S)
            assert await trio.to_thread.run_sync(is_third.wait, 20)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)


async def test_a_name_belongs_to_one_state_directory_at_a_time(etcd, request):
    fleet = fleet_of(request)
    await Membership(etcd, fleet, "east", lambda: EAST).join()
    with pytest.raises(Exists, match=r"has another machine east, at 10.0.0.1:7313: choose another `machine`"):
        await Membership(etcd, fleet, "east", lambda: WEST).join()
    # the same daemon after kill -9: its record is still there
    again = Membership(etcd, fleet, "east", lambda: replace(EAST, free_bytes=7))
    await again.join()
    assert again.info()["machines"]["east"]["free_bytes"] == 7


async def test_of_daemons_that_register_a_name_at_the_same_time_one_gets_it(etcd, request):
    machines = [replace(EAST, state=str(number)) for number in range(4)]
    refused = []

    async def join(machine: Machine) -> None:
        try:
            await Membership(etcd, fleet_of(request), "east", lambda: machine).join()
        except Exists:
            refused.append(machine)

    async with trio.open_nursery() as nursery:
        for each in machines:
            nursery.start_soon(join, each)
    (record,) = etcd.read(f"symphony/{fleet_of(request)}/machines/")
    winner = machine_of(record)
    assert sorted(each.state for each in refused) == [each.state for each in machines if each != winner]


async def test_a_record_that_somebody_has_removed_or_spoiled_is_written_again(etcd, request, monkeypatch):
    monkeypatch.setattr("symphony.fleet.membership.RENEW_S", 0.01)
    fleet = fleet_of(request)
    prefix = f"symphony/{fleet}/machines/"
    east = Membership(etcd, fleet, "east", lambda: EAST)

    def stored() -> list[Machine | None]:
        return [machine_of(each) for each in etcd.read(prefix)]

    await east.join()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(east.run)
        etcd.revoke(etcd.read(prefix)[0].lease)
        await until(lambda: stored() == [EAST])
        etcd.put(prefix + "east", b"?", 0, etcd.read(prefix)[0].revision)
        await until(lambda: stored() == [EAST])
        nursery.cancel_scope.cancel()
    assert stored() == []


@pytest.mark.slow
async def test_an_answer_about_the_largest_fleet_fits_into_a_message_of_libsym(etcd, request):
    prefix = f"symphony/{fleet_of(request)}/machines/"
    identity = {f"{number:x}": "" for number in range(166)}  # keys without values, since each key is shown twice
    largest = json.dumps(asdict(EAST) | {"identity": identity}, separators=(",", ":")).encode()
    assert MAX_RECORD_BYTES * 0.9 < len(largest) <= MAX_RECORD_BYTES
    for number in range(MAX_MACHINES + 1):
        assert etcd.put(f"{prefix}{'m' * 50}{number}", largest, 0, 0)
    west = Membership(etcd, fleet_of(request), "west", lambda: WEST)
    await west.join()
    assert len(west.addresses) == MAX_MACHINES
    assert "west" in west.info()["machines"]
    assert len(json.dumps(west.info())) < 0.9 * MAX_FRAME_BYTES


async def test_a_daemon_waits_only_so_long_for_a_slow_etcd_before_it_starts(client, monkeypatch):
    monkeypatch.setattr("symphony.fleet.membership.JOIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        east = Membership(client(f"http://127.0.0.1:{silent.getsockname()[1]}"), "f", "east", lambda: EAST)
        await east.join()
    assert east.info()["trouble"] == "etcd did not register this daemon within 0.1 s"


async def test_an_etcd_that_writes_nothing_is_trouble(client):
    with answering(b'{"header": {}, "ID": "7", "TTL": "7"}') as port:
        east = Membership(client(f"http://127.0.0.1:{port}"), "f", "east", lambda: EAST)
        await east.join()
    assert "another daemon writes the record of east" in east.info()["trouble"]


@pytest.mark.slow
async def test_etcd_may_be_away_at_the_start_and_later_and_the_log_says_so_once(client, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("symphony.fleet.membership.RENEW_S", 0.1)
    monkeypatch.setattr("symphony.fleet.membership.RETRY_S", 0.1)
    server = EtcdServer(tmp_path)
    east = Membership(client(server.url), "f", "east", lambda: EAST)
    west = Membership(client(server.url), "f", "west", lambda: WEST)
    lost = Membership(client("http://127.0.0.1:1"), "f", "lost", lambda: WEST)
    try:
        server.kill()
        await east.join()
        assert "Connection refused" in east.info()["trouble"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(east.run)
            for _ in range(2):
                await trio.sleep(0.5)
                await trio.to_thread.run_sync(server.start)
                await until(lambda: not east.info()["trouble"])
                await west.join()
                assert sorted(west.addresses) == ["east"]
                server.kill()
                await until(lambda: bool(east.info()["trouble"]))
                assert sorted(east.addresses) in ([], ["west"])
            shutil.rmtree(tmp_path / "etcd")  # a new etcd, whose revisions begin at 1
            await trio.to_thread.run_sync(server.start)
            await until(lambda: not east.info()["trouble"])
            await west.join()
            assert sorted(west.addresses) == ["east"]
            nursery.cancel_scope.cancel()
        await lost.join()
    finally:
        server.kill()
    lines = [each.getMessage() for each in caplog.records if each.getMessage().startswith("fleet f: ")]
    assert [("does not answer" in line) for line in lines] == [True, False] * 3 + [True]


MACHINES = [
    *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000),
    json.dumps(asdict(EAST) | {"model": "\u00e4"}, ensure_ascii=False).encode(),
    *(
        json.dumps(asdict(EAST) | part).encode()
        for part in (
            {"address": 1}, {"address": "nowhere"}, {"identity": {"a": 1}}, {"free_bytes": "x"}, {"since_s": None},
            {"model": "m" * MAX_RECORD_BYTES},
            {"model": "\x1b[2J"}, {"identity": {"\n": "x"}}, {"free_bytes": -1}, {"since_s": 1 << 70},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("value", MACHINES, ids=lambda value: str(value[-40:]))
def test_a_malformed_record_is_no_machine(value):
    assert machine_of(Record("k", value, 1, 0)) is None


@pytest.mark.parametrize("load", [None, {}, {"calls": 1}, dict.fromkeys(("calls", "step_us", "row_us"), 1), 7, "idle"])
def test_a_machine_whose_load_is_not_there_or_malformed_has_no_load(load):
    without = {key: value for key, value in asdict(EAST).items() if key != "load"}
    for fields in (without, without | {"load": load}):
        assert machine_of(Record("k", json.dumps(fields).encode(), 1, 0)) == EAST
    for number in (-1, 1 << 70):
        fields = without | {"load": asdict(replace(LOAD, backlog_us=number))}
        assert machine_of(Record("k", json.dumps(fields).encode(), 1, 0)) == EAST


async def test_a_machine_publishes_its_load(etcd, request):
    fleet = fleet_of(request)
    busy = replace(EAST, load=LOAD)
    east, west = Membership(etcd, fleet, "east", lambda: busy), Membership(etcd, fleet, "west", lambda: WEST)
    await east.join()
    await west.join()
    assert west.machines() == {"east": busy, "west": WEST}
    assert west.info()["machines"]["east"]["load"] == asdict(LOAD)


def test_a_daemon_whose_certificate_has_another_name_is_refused(tmp_path):
    make_keys(tmp_path, ["east", "west=west.example"])
    require_name(*contexts(tmp_path / "east"), "east")
    require_name(*contexts(tmp_path / "west"), "west.example")
    with pytest.raises(Invalid, match=r"no peer would take this daemon for east: .*east"):
        require_name(*contexts(tmp_path / "west"), "east")
    for host in ("nörd", "bad host", "-a"):
        with pytest.raises(Invalid, match="is no host"):
            make_keys(tmp_path, [f"north={host}"])


def test_keys_are_made_for_hosts_too(tmp_path: Path):
    make_keys(tmp_path, ["a=::1", "b=10.0.0.1"])
    require_name(*contexts(tmp_path / "a"), "::1")
    require_name(*contexts(tmp_path / "b"), "10.0.0.1")
