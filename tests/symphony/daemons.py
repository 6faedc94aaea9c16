"""Real daemons for tests: a process, a mount, a socket, in a directory of the test's own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.forked import Forked, run
from tests.symphony.launchers import PIPES, end_launchers, started

SYMPHONY = [sys.executable, "-m", "symphony"]


class Daemon:
    """A `symphony serve` that is started and ready; its weights may still be on their way."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        command: list[str] = SYMPHONY,
        environment: Mapping[str, str] = MappingProxyType({}),
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        """`command`: what to start in place of `symphony`; it has a pipe as its standard input. `environment`: beside
        what others have, for the daemon alone. `inherited`: it has their descriptors.
        """
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip("NO DAEMON TESTED: /dev/fuse is missing or not open to this user")
        self.mount = directory / "kv"
        self.socket = directory / "symphony.sock"
        self.log = directory / "daemon.log"
        # Of launchers: short, for they have sockets deep below it; the same for each daemon of this directory.
        self.runtime = Path(tempfile.gettempdir()) / f"sl-{sha256(bytes(directory)).hexdigest()[:10]}"
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.environment = {**os.environ, "SYMPHONY_SOCKET": str(self.socket), "XDG_RUNTIME_DIR": str(self.runtime)}
        with self.log.open("ab") as log:
            self.process = started(
                [*command, "serve", "--mount", self.mount, "--state", directory / "state", *options],
                stdin=None if command is SYMPHONY else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**self.environment, **environment},
                pass_fds=[each.fileno() for each in inherited],
            )
        line = self.process.stdout.readline()  # printed when mount and socket are there; empty when it ended instead
        assert line.startswith("symphony: "), self.log.read_text()

    def symphony(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A `symphony` command that talks to this daemon."""
        return self.shell([*SYMPHONY, *words], check=check)

    def shell(self, command: str | list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command in the mount's directory's sight; its output is text."""
        how: dict[str, Any] = {"env": self.environment, "cwd": self.mount.parent, "timeout": 100, "text": True}
        done = run(command, shell=isinstance(command, str), **how)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def stat(self) -> dict:
        return json.loads(self.symphony("stat", "--json").stdout)

    def program(self, source: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a LIP given as text; it has libsym as `sym`."""
        head = "import sys, os, time, threading\nimport libsym as sym\n"
        command = [sys.executable, "-c", head + textwrap.dedent(source), *arguments]
        return Forked(command, env=self.environment, **PIPES)

    def run(self, source: str, *arguments: str) -> str:
        """Run a LIP given as text to its end; return its output."""
        process = self.program(source, *arguments)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        return out

    def tell(self, word: str = "") -> None:
        """Write a line to the standard input of a daemon that `command` started."""
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the daemon as a service manager (or Ctrl-C) would; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(30)
        self.process.stdout.close()
        return status

    def clean_up(self) -> None:
        """Remove all processes and mounts, in any state that a test left."""
        end_launchers(self.runtime)
        shutil.rmtree(self.runtime, ignore_errors=True)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if f" {self.mount} " in Path("/proc/mounts").read_text():
            subprocess.run(["fusermount3", "-uzq", self.mount], check=False)


@contextmanager
def a_daemon(directory: Path, *options: str) -> Iterator[Daemon]:
    """A daemon that ends in order, and whose log has no traceback."""
    daemon = Daemon(directory, *options)
    try:
        yield daemon
        assert daemon.stop() == 0, daemon.log.read_text()
        assert not os.path.ismount(daemon.mount)
        assert "Traceback" not in daemon.log.read_text()
    finally:
        daemon.clean_up()
