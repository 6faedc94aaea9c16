"""One daemon with a real model and one gateway before it, for all tests of clients; tests of keys start their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.symphony.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60


class Gateway:
    """A gateway of a test's own, as a process."""

    def __init__(self, daemon: Daemon, *options: str) -> None:
        self.daemon = daemon
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lips.gateway", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**daemon.environment, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        if not line.startswith("gateway: http://"):
            _, more = self.process.communicate(timeout=READY_S)
            raise AssertionError(line + more)
        self.url = line.split()[1]
        self.files = daemon.mount / f"gateway-{os.geteuid()}"

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers, trust_env=False)

    def stop(self) -> str:
        """Ends it; gives what it has said since it began."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
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
def _gateway(gateway_daemon):
    gateway = Gateway(gateway_daemon)
    try:
        yield gateway
        said = gateway.stop()
        assert "Traceback" not in said, said
    finally:
        gateway.process.kill()
        gateway.process.wait()


@pytest.fixture
def gateway(_gateway, monkeypatch):
    """The gateway, whose clients find it by the usual variables; afterwards nothing runs in it any more."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{_gateway.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", _gateway.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield _gateway
    end_s = time.monotonic() + READY_S
    with _gateway.client() as client:
        while "symphony_gateway_running 0\n" not in client.get("/metrics").text:
            assert time.monotonic() < end_s, "a request goes on whose client has gone"
            time.sleep(0.05)


@pytest.fixture
def http(gateway):
    with gateway.client() as client:
        yield client


@pytest.fixture
def start_gateway(gateway_daemon):
    """Makes gateways with options of their own."""
    started: list[Gateway] = []

    def start(*options: str) -> Gateway:
        started.append(Gateway(gateway_daemon, *options))
        return started[-1]

    yield start
    for gateway in started:
        said = gateway.stop()
        assert "Traceback" not in said, said
