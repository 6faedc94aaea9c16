"""Fixtures: a daemon with a tiny model for the tests of a module."""

import os
import tempfile
from pathlib import Path

import pytest

import libsym as sym
from tests.symphony.daemons import Daemon
from tests.symphony.launchers import Launchers


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    daemon = Daemon(tmp_path_factory.mktemp("daemon"), "--model", "tiny", "--kv-memory", "64M")
    try:
        yield daemon
        assert daemon.stop() == 0, daemon.log.read_text()
        assert not os.path.ismount(daemon.mount)
        assert "Traceback" not in daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.fixture
def connected(daemon, monkeypatch):
    """A daemon that this process and the programs it starts can reach. After the test its accounts balance."""
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    yield daemon
    sym.daemon_check()
    sym.close()


@pytest.fixture
def start_daemon(tmp_path):
    """Starts daemons in the test's directory. They end with the test."""
    daemons = []

    def start(*options, **how):
        daemons.append(Daemon(tmp_path, *options, **how))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.clean_up()


@pytest.fixture
def launchers(tmp_path):
    """Yield launchers and the daemon's side of them. Programs end with the test, and no log may have a traceback."""
    with tempfile.TemporaryDirectory(prefix="sl") as runtime:
        launchers = Launchers(tmp_path, Path(runtime))
        try:
            yield launchers
            for log in Path(runtime).glob("symphony/*/launcher.log"):
                assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            launchers.clean_up()
