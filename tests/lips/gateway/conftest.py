"""Fixtures: one gateway for all tests of clients, before the daemon of the programs. Tests of keys start their own."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest

from lips.gateway.keys import new_key
from tests.forked import Forked
from tests.lips.gateway.pages import HEIGHT, WIDTH
from tests.lips.gateway.wire import running, until
from tests.symphony.browser import Browser
from tests.symphony.daemons import Daemon, a_daemon

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
        state = str(daemon.mount.parent / "of_gateway")
        self.process = Forked(
            [sys.executable, *(["-c", BLIND] if blind else ["-m", "lips.gateway"]), "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**daemon.environment, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": state, **environment},
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
            before, _, self.key = self._lines.get(timeout=READY_S).strip().partition("#key=")
            assert (before, bool(self.key)) == (f"gateway: {self.url}/", True)
        self.files = daemon.mount / f"gateway-{os.geteuid()}"

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
        """Stop the gateway; return its whole output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join()
        said = "".join(self.said)
        assert self.process.returncode == 0, said
        return said


class Keyed:
    """A gateway with a file of keys, to which each test adds its own."""

    def __init__(self, start: Callable[..., Gateway], path: Path) -> None:
        self.path = path
        path.touch(0o600)
        self.gateway = start("--keys", str(path))

    def key(self, limits: str = "", name: str = "") -> str:
        key, line = new_key(name or f"key{len(self.path.read_text())}")
        with self.path.open("a") as file:
            file.write(f"{line} {limits}\n")
        return key

    def client(self, limits: str = "", name: str = "") -> httpx.Client:
        return self.gateway.client(self.key(limits, name))


@contextmanager
def gateways(daemon: Daemon) -> Iterator[Callable[..., Gateway]]:
    """A function that starts gateways, which all end in order."""
    started: list[Gateway] = []

    def start(*options: str, **how: Any) -> Gateway:
        started.append(Gateway(daemon, *options, **how))
        return started[-1]

    try:
        yield start
        for gateway in started:
            said = gateway.stop()
            assert "Traceback" not in said, said
    finally:
        for gateway in started:
            gateway.process.kill()
            gateway.process.wait()


@pytest.fixture(scope="session")
def _lips_daemon(tmp_path_factory):
    """A daemon of bf16, which knows the capital of France without a system's message; 4-bit codes do not."""
    with a_daemon(tmp_path_factory.mktemp("gateways"), "--model", "smollm2", "--kv-memory", "512M") as daemon:
        yield daemon


@pytest.fixture(autouse=True, scope="session")
def backend() -> str:
    """Return the event loop of tests that are coroutines: the gateway's."""
    return "asyncio"


@pytest.fixture(scope="session")
def gateway_daemon(_lips_daemon):
    return _lips_daemon


@pytest.fixture(scope="session")
def _gateways(gateway_daemon):
    """Gives the gateway that demands a key, or the other one. Each starts at its first use."""
    with gateways(gateway_daemon) as start:
        yield cache(lambda wants_key: start(blind=wants_key))


@pytest.fixture(scope="session")
def keyed(gateway_daemon, tmp_path_factory):
    with gateways(gateway_daemon) as start:
        yield Keyed(start, tmp_path_factory.mktemp("keyed") / "keys")


@pytest.fixture
def gateway(_gateways, monkeypatch, request):
    """The gateway, which clients find by the usual variables. After the test no request of the test may still run."""
    gateway = _gateways(getattr(request, "param", False))
    key = gateway.key if gateway.is_blind else "none"
    for name, value in (("OPENAI_BASE_URL", f"{gateway.url}/v1"), ("ANTHROPIC_BASE_URL", gateway.url)):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.replace("BASE_URL", "API_KEY"), key)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield gateway
    with gateway.client() as client:
        until(lambda: running(client) == 0)


@pytest.fixture
def http(gateway):
    with gateway.client() as client:
        yield client


@pytest.fixture(scope="session")
def tiny_gateway(_tiny_daemon):
    """Gateway in front of the tiny model, whose tokens are bytes."""
    with gateways(_tiny_daemon) as start:
        yield start()


@pytest.fixture
def tiny(tiny_gateway):
    with tiny_gateway.client() as client:
        yield client


@pytest.fixture
def start_gateway(gateway_daemon):
    """Makes gateways with options of their own."""
    with gateways(gateway_daemon) as start:
        yield start


@pytest.fixture
def browser(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("PAGE NOT OPENED IN A BROWSER: there is no chromium")
    browser = Browser(tmp_path / "profile", WIDTH, HEIGHT)
    yield browser
    browser.close()
