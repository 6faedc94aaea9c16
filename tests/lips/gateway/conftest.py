"""Fixtures: one daemon with a real model and one gateway for all tests of clients. Tests of keys start their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest

from tests.symphony.daemons import Daemon

ROOT = Path(__file__).resolve().parents[3]
READY_S = 60


BLIND = """import errno, os, runpy, socket
class Blind(socket.socket):
    def __init__(self, family=-1, *more, **others):
        if family == socket.AF_NETLINK:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *more, **others)
socket.socket = Blind
runpy.run_module("lips.gateway", run_name="__main__", alter_sys=True)
"""
"""Gateway that cannot find the owner of a connection, as in a unit without AF_NETLINK. All clients need the key."""


class Gateway:
    """Gateway of one test, as a process."""

    def __init__(self, daemon: Daemon, *options: str, blind: bool = False, **environment: str) -> None:
        self.daemon = daemon
        self.is_blind = blind
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", BLIND] if blind else ["-m", "lips.gateway"]), "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **daemon.environment,
                "PYTHONPATH": str(ROOT),
                "XDG_STATE_HOME": str(daemon.mount.parent / "of_gateway"),
                **environment,
            },
        )
        self.said: list[str] = []
        """Lines of the gateway's log so far."""
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        line = self._lines.get(timeout=READY_S)
        if not line.startswith("gateway: http://"):
            self.process.wait(READY_S)
            raise AssertionError("".join(self.said))
        self.url = line.split()[1]
        self.key = ""
        if "--keys" not in options:
            self.key = self._told(f"gateway: {self.url}/#key=")
        self.files = daemon.mount / f"gateway-{os.geteuid()}"

    def _told(self, what: str) -> str:
        """Return the rest of the next line, which must begin with `what`."""
        line = self._lines.get(timeout=READY_S)
        assert line.startswith(what), line
        return line.removeprefix(what).strip()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line)
                self._lines.put(line)

    def until_it_says(self, what: str) -> str:
        """Return the next line that contains `what`."""
        while what not in (line := self._lines.get(timeout=READY_S)):
            pass
        return line

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client with a key. Without `key`, it uses the gateway's key only if the gateway demands one."""
        key = key or (self.key if self.is_blind else "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, trust_env=False)

    def stop(self) -> str:
        """Stop the gateway. Return its whole output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join()
        said = "".join(self.said)
        assert self.process.returncode == 0, said
        return said


@pytest.fixture(scope="session")
def gateway_daemon(tmp_path_factory):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO GATEWAY TESTED: /dev/fuse is missing or not open to this user")
    daemon = Daemon(tmp_path_factory.mktemp("gateway"), "--model", "smollm2", "--kv-memory", "512M")
    try:
        yield daemon
        assert daemon.stop() == 0, daemon.log.read_text()
        assert "Traceback" not in daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.fixture(scope="session")
def _gateways(gateway_daemon):
    """Return a function that gives the gateway that demands a key, or the other one. Each starts at its first use."""
    started: dict[bool, Gateway] = {}

    def of(wants_key: bool) -> Gateway:
        if wants_key not in started:
            started[wants_key] = Gateway(gateway_daemon, blind=wants_key)
        return started[wants_key]

    try:
        yield of
        for gateway in started.values():
            said = gateway.stop()
            assert "Traceback" not in said, said
    finally:
        for gateway in started.values():
            gateway.process.kill()
            gateway.process.wait()


BOTH_WAYS = {
    "test_it_answers_and_counts",
    "test_a_stream_is_the_same_answer_in_pieces",
    "test_the_async_client_has_many_at_once",
    "test_errors_are_the_clients_own_classes",
    "test_a_question_needs_no_headers",
    "test_several_requests_go_over_one_connection",
}
"""Tests that run twice, as all of `test_clients` do: once with a client known by its account, once with the key."""


def pytest_generate_tests(metafunc):
    is_of_clients = metafunc.module.__name__.endswith(".test_clients")
    if "gateway" in metafunc.fixturenames and (is_of_clients or metafunc.function.__name__ in BOTH_WAYS):
        metafunc.parametrize("gateway", [False, True], ids=["account", "key"], indirect=True)


@pytest.fixture
def gateway(_gateways, monkeypatch, request):
    """The gateway, which clients find by the usual variables. After the test no request of the test may still run."""
    gateway = _gateways(getattr(request, "param", False))
    key = gateway.key if gateway.is_blind else "none"
    monkeypatch.setenv("OPENAI_BASE_URL", f"{gateway.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", gateway.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield gateway
    end_s = time.monotonic() + READY_S
    with gateway.client() as client:
        while "symphony_gateway_running 0\n" not in client.get("/metrics").text:
            assert time.monotonic() < end_s, "a request goes on whose client has gone"
            time.sleep(0.05)


@pytest.fixture
def http(gateway):
    with gateway.client() as client:
        yield client


@pytest.fixture(scope="session")
def tiny_gateway(tmp_path_factory):
    """Gateway in front of the tiny model, whose tokens are bytes."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO GATEWAY TESTED: /dev/fuse is missing or not open to this user")
    daemon = Daemon(tmp_path_factory.mktemp("tiny"), "--model", "tiny", "--kv-memory", "64M")
    try:
        gateway = Gateway(daemon)
        try:
            yield gateway
            assert "Traceback" not in gateway.stop()
        finally:
            gateway.process.kill()
            gateway.process.wait()
        assert daemon.stop() == 0, daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.fixture
def tiny(tiny_gateway):
    with tiny_gateway.client() as client:
        yield client


@pytest.fixture
def start_gateway(gateway_daemon):
    """Makes gateways with options of their own."""
    started: list[Gateway] = []

    def start(*options: str, **how: Any) -> Gateway:
        started.append(Gateway(gateway_daemon, *options, **how))
        return started[-1]

    yield start
    for gateway in started:
        said = gateway.stop()
        assert "Traceback" not in said, said
