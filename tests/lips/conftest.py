"""Fixtures: a daemon with a real model for all tests of programs, and programs as processes."""

import gc
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile

import pytest

import libsym as sym
from tests.forked import Forked
from tests.symphony.daemons import Daemon, a_daemon

LIPS = Path(__file__).resolve().parents[2] / "lips"


class Lips:
    """The programs that ship, beside a daemon to which this process is connected."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.mount = daemon.mount

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the program as a process of its own, with pipes."""
        return Forked(
            [sys.executable, str(LIPS / f"{name}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.daemon.environment, "PYTHONPATH": str(LIPS.parent), **environment},
        )

    def finish(self, name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run the program to its end, with this text as its user's input."""
        process = self.start(name, *arguments)
        out, err = process.communicate(text, timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def here(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the program to its end in this process, which takes half of the time."""
        if name == "mcp_client":  # its server writes to the standard error of the moment when `mcp` was imported
            return self.finish(name, *arguments)
        words = [str(LIPS / f"{name}.py"), *arguments]
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
                runpy.run_path(words[0], run_name="__main__")
            status = ended.value.code or 0
            if isinstance(status, str):
                print(status, file=err)
                status = 1
            del ended
            gc.collect()  # the files that it has left open
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, status, out.read(), err.read())

    def run(self, name: str, *arguments: str, text: str = "") -> str:
        """Run a program to its end, which must be a success. Return its output."""
        done = self.finish(name, *arguments, text=text) if text else self.here(name, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, name: str, *arguments: str, status: int = 1) -> str:
        """Run a program that ends with this status and one line, which is returned."""
        done = self.here(name, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stdout + done.stderr
        return done.stderr


@pytest.fixture(scope="session")
def _lips_daemon(tmp_path_factory):
    """A daemon that computes with the 4-bit codes that the model's file stores, in two thirds of bf16's time."""
    with a_daemon(
        tmp_path_factory.mktemp("lips"), "--model", "smollm2", "--precision", "int4", "--kv-memory", "512M"
    ) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def _tiny_daemon(tmp_path_factory):
    with a_daemon(tmp_path_factory.mktemp("tiny"), "--model", "tiny", "--kv-memory", "512M") as daemon:
        yield daemon


@pytest.fixture
def lips(_lips_daemon, monkeypatch):
    """The programs and their daemon. After the test its accounts balance, and the programs' files are gone."""
    yield from beside(_lips_daemon, monkeypatch)


@pytest.fixture
def tiny(_tiny_daemon, monkeypatch):
    """The same with a small random model, whose tokens are bytes, for tests that need no sensible answer."""
    yield from beside(_tiny_daemon, monkeypatch)


def beside(daemon, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon.runtime))
    sym.connect(str(daemon.socket))
    yield Lips(daemon)
    sym.daemon_check()
    sym.close()
    theirs = ["-path", f"{daemon.mount}/gateway-*"]  # of gateways, which live as long as the daemon
    subprocess.run(["find", daemon.mount, "-mindepth", "1", "-not", *theirs, "-delete"], check=True)


@pytest.fixture
def computed():
    """Calls a function. Returns its result, and how many tokens the daemon computed for this process meanwhile."""

    def count(call, *arguments, **how):
        before = sym.getrusage().tokens
        result = call(*arguments, **how)
        return result, sym.getrusage().tokens - before

    return count
