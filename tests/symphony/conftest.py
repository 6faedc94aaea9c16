"""Fixtures: daemons with a tiny model, launchers, and commands in this process."""

import gc
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

import libsym as sym
from symphony.cli import main
from tests.symphony.daemons import SYMPHONY, Daemon, a_daemon
from tests.symphony.launchers import Launchers, eventually


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory):
    """A daemon for all modules whose tests leave it as they found it. In the end nothing of them is left in it."""
    with a_daemon(tmp_path_factory.mktemp("shared"), "--model", "tiny", "--kv-memory", "64M") as daemon:
        yield daemon
        sym.connect(str(daemon.socket))
        eventually(lambda: (stat := sym.daemon_stat())["num_free_pages"] == stat["num_pages"])
        assert sym.daemon_check()["num_locked_files"] == 0
        sym.close()


@pytest.fixture
def shared(shared_daemon, monkeypatch):
    """The daemon of the session, which this process and the programs it starts can reach.

    After the test its accounts balance, and its mount is emptied.
    """
    yield from connected_to(shared_daemon, monkeypatch)


def connected_to(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    eventually(lambda: sym.daemon_stat()["lips"] == 1)  # those of the test before are gone
    yield daemon
    sym.close()  # the test may have confined it to a domain, or be connected to another one
    sym.connect(str(daemon.socket))
    sym.daemon_check()
    sym.close()
    empty(daemon.mount)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with a_daemon(tmp_path_factory.mktemp("daemon"), "--model", "tiny", "--kv-memory", "64M") as daemon:
        yield daemon


@pytest.fixture
def connected(daemon, monkeypatch):
    """A daemon of the module's own, which this process and the programs it starts can reach."""
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    yield daemon
    sym.daemon_check()
    sym.close()


def empty(directory):
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def emptied(shared):
    """The same; before and after the test all pages are free. Pages of programs that have just ended come back late."""
    _free_all_pages(shared)
    yield shared
    _free_all_pages(shared)


def _free_all_pages(daemon):
    def are_free():
        info = sym.daemon_stat()
        return info["num_free_pages"] == info["num_pages"]

    empty(daemon.mount)
    gc.collect()
    eventually(are_free)


@pytest.fixture
def open_to_all(tmp_path):
    """Other users' programs reach what is in the test's directory, the socket of its daemon above all."""
    tmp_path.chmod(0o755)


@pytest.fixture
def start_daemon(tmp_path):
    """Starts daemons in the test's directory. One that is left ends in order, and their log has no traceback."""
    daemons = list[Daemon]()

    def start(*options, **how):
        daemons.append(Daemon(tmp_path, *options, **how))
        return daemons[-1]

    try:
        yield start
        for daemon in daemons:
            assert daemon.process.poll() is not None or daemon.stop() == 0, daemon.log.read_text()
            assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()
    finally:
        for daemon in daemons:
            daemon.clean_up()


@pytest.fixture(params=["asyncio", "trio"])
def backend(request):
    """Has a test that is a coroutine run in event loops of both kinds."""
    return request.param


@pytest.fixture
def start_planted(start_daemon):
    """Starts daemons in which a text of Python has replaced something before."""

    def start(planted, *options, **how):
        lines = ("import signal, sys, threading", "from symphony.cli import main", planted, "sys.exit(main())")
        return start_daemon(*options, command=[SYMPHONY[0], "-c", "\n".join(lines)], **how)

    return start


@pytest.fixture
def symphony(capsys):
    """Return a function that runs a command in this process, and gives its status, its output and its errors."""
    return lambda *words: (main([str(word) for word in words]), *capsys.readouterr())


@contextmanager
def new_launchers(directory):
    with tempfile.TemporaryDirectory(prefix="sl") as runtime:
        launchers = Launchers(directory, Path(runtime))
        try:
            yield launchers
            for log in Path(runtime).glob("symphony/*/launcher.log"):
                assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            launchers.clean_up()


@pytest.fixture
def own_launchers(tmp_path):
    """Yield launchers and the daemon's side of them. Programs end with the test, and no log may have a traceback."""
    with new_launchers(tmp_path) as launchers:
        yield launchers


@pytest.fixture(scope="module")
def launchers_of_module(tmp_path_factory):
    with new_launchers(tmp_path_factory.mktemp("launcher")) as launchers:
        yield launchers


@pytest.fixture
def launchers(launchers_of_module, tmp_path, tmp_path_factory):
    """The launcher of the module, for a test that leaves it alone. Directory, environment, programs are the test's."""
    launchers, environment = launchers_of_module, launchers_of_module.environment
    launchers.directory, launchers.environment = tmp_path, {**environment}
    launchers.outside = tmp_path_factory.mktemp("outside")
    yield launchers
    launchers.end_clients()
    launchers.end_programs()
    launchers.environment, launchers.daemon.mount = environment, None
