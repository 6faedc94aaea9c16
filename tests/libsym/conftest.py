"""Fixtures: daemons as processes of their own, which a client in the test reaches over a real socket."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import libsym as sym
from libsym.channel.client import ClientChannel
from tests.libsym.echo_client import VOCAB_SIZE, Daemon, start


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start_one(vocab_size: int = VOCAB_SIZE) -> Daemon:
        started.append(start(tmp_path / f"{len(started)}.sock", vocab_size))
        return started[-1]

    yield start_one
    for each in started:
        each.kill()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests that do not kill it."""
    found = start(tmp_path_factory.mktemp("libsym") / "daemon.sock")
    yield found
    found.kill()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ClientChannel]:
    channel = daemon.client()
    yield channel
    channel.close()


@pytest.fixture
def observer(daemon: Daemon) -> Iterator[ClientChannel]:
    """Another program's connection, to look at the daemon while a client waits."""
    channel = daemon.client()
    yield channel
    channel.close()


@pytest.fixture
def connected(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon that libsym's functions reach by the environment, as in any program."""
    sym.close()
    monkeypatch.setenv("SYMPHONY_SOCKET", daemon.path)
    yield daemon
    sym.close()
