"""The port of the metrics: its answers and its clients, none of whom can keep it to himself."""

import errno
import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from libsym.errors import SymError
from scheduler.status.metrics_port import CONTENT_TYPE, FRESH_S, HOSTS, MAX_CONNECTIONS, MAX_REQUEST_BYTES, MetricsPort


class Port:
    """A port of a test's own, whose text says how often it was asked for."""

    def __init__(self):
        self.num_made = 0
        self.served = MetricsPort(0, self._make)

    def _make(self):
        self.num_made += 1
        return f"made {self.num_made}\n"

    async def connected(self, host="127.0.0.1"):
        return await trio.open_tcp_stream(host, self.served.number or 0)

    async def ask(self, request, host="127.0.0.1"):
        """Return the whole answer, until the port closes the connection."""
        async with await self.connected(host) as stream:
            await stream.send_all(request.encode())
            return await rest_of(stream)

    def run_test(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.served.run)
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(60):
                    await scenario()
                nursery.cancel_scope.cancel()

        trio.run(main)


async def rest_of(stream):
    return "".join([part.decode() async for part in stream])


def get(path="/metrics", host="localhost", method="GET", more=""):
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


@pytest.fixture
def port():
    return Port()


async def test_the_text_is_told_with_its_type_and_the_connection_is_closed(port):
    head, _, text = (await port.ask(get())).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert f"Content-Type: {CONTENT_TYPE}" in head
    assert "Content-Length: 7" in head
    assert text == "made 1\n"
    head, _, text = (await port.ask(get(method="HEAD"))).partition("\r\n\r\n")
    assert "Content-Length: 7" in head
    assert text == ""


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        *((get(path), status) for path, status in (("/", 404), ("/metrics/", 404), ("/metrics?all=1", 200))),
        (get(method="POST", more="Content-Length: 3\r\n") + "abc", 405),
        (get(method="POST", more="Content-Length: 100000\r\n") + 100_000 * "x", 405),
        (get(method="POST", more="Transfer-Encoding: chunked\r\n") + "no chunk\r\n", 400),
        *((get(host=host), 200) for host in ("127.0.0.1:9464", "[::1]:9464", "LocalHost")),
        *((get(host=f"{host}evil.example{port}"), 403) for host, port in (("", ""), ("localhost.", ":80"))),
        (get(host="evil.example:127.0.0.1"), 403),
        *((get(method=each, more="Transfer-Encoding: chunked\r\n") + "no size\r\n", 400) for each in ("GET", "HEAD")),
        ("GET /metrics HTTP/1.0\r\n\r\n", 200),
        ("GET /metrics HTTP/1.1\r\n\r\n", 400),
        ("no request\r\n\r\n", 400),
        (get(more=f"X: {3 * MAX_REQUEST_BYTES * 'x'}\r\n"), 431),
        (4 * MAX_REQUEST_BYTES * "x", 431),
    ],
)
async def test_what_is_asked_for_is_answered_with_its_status(port, request_text, status):
    answer = await port.ask(request_text)
    assert answer.startswith(f"HTTP/1.1 {status} "), answer
    assert answer.count("HTTP/1.1") == 1
    assert "made" in await port.ask(get()), "it harms nobody"


async def test_the_text_is_made_only_some_times_a_second_however_often_it_is_asked_for(port):
    began_s = trio.current_time()
    for _ in range(20):
        await port.ask(get())
    took_s = trio.current_time() - began_s
    assert 1 <= port.num_made <= 1 + took_s / FRESH_S


@pytest.mark.slow
async def test_those_who_say_nothing_are_closed_when_somebody_else_comes(port):
    silent = [await port.connected() for _ in range(2 * MAX_CONNECTIONS)]
    half = await port.connected()
    await half.send_all(b"GET /metrics HTTP/1.1\r\nHost: ")
    for _ in range(MAX_CONNECTIONS):
        assert "made" in await port.ask(get())
    assert await rest_of(silent[0]) == ""
    for stream in (*silent, half):
        await stream.aclose()
    assert "made" in await port.ask(get())


@pytest.mark.slow
async def test_connections_to_both_addresses_at_once_are_no_more_than_there_may_be(port):
    if len(port.served._bound) < 2:
        pytest.skip("NOT TESTED ON BOTH: this machine has no IPv6")
    silent = [await port.connected(host) for _ in range(2 * MAX_CONNECTIONS) for host in HOSTS]
    assert "made" in await port.ask(get())
    open_ones = 0
    for stream in silent:
        with trio.move_on_after(0.05) as waited:
            await rest_of(stream)
        open_ones += waited.cancelled_caught
    assert open_ones < MAX_CONNECTIONS
    for stream in silent:
        await stream.aclose()


async def test_who_says_nothing_is_closed_after_a_time(port, monkeypatch):
    monkeypatch.setattr("scheduler.status.metrics_port.DEADLINE_S", 0.1)
    async with await port.connected() as stream:
        assert await rest_of(stream) == ""


async def test_who_goes_in_the_middle_of_everything_does_no_harm(port):
    for begun in (b"", b"GET /met", get().encode(), 3 * get().encode()):
        raw = socket.create_connection(("127.0.0.1", port.served.number))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, at once
        raw.sendall(begun)
        raw.close()
    assert "made" in await port.ask(get())


async def test_it_is_there_on_the_loopback_of_both_families_and_nowhere_else(port):
    if len(port.served._bound) < 2:
        pytest.skip("NOT TESTED ON ::1: this machine has no IPv6")
    assert "made" in await port.ask(get(), host="::1")
    assert {each.getsockname()[0] for each in port.served._bound} == {"127.0.0.1", "::1"}


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(SymError, match=f"no metrics on port {number} of 127.0.0.1: .*--metrics-port") as failed:
            MetricsPort(number, str)
        assert failed.value.errno == errno.EADDRINUSE
    off = MetricsPort(None, str)
    assert off.number is None
    trio.run(off.run)


def test_a_text_that_can_not_be_made_costs_that_connection_alone(port, caplog):
    async def scenario():
        port.served._text = lambda: "\ud800"
        assert await port.ask(get()) == ""
        port.served._text = lambda: "made again"
        assert "made again" in await port.ask(get())

    port.run_test(scenario)
    assert "connection for metrics dropped" in caplog.text
