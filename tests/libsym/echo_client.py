"""The test's end of an echo daemon: starting one, and asking how it is."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import libsym
from libsym.abi import Op
from libsym.channel.client import ClientChannel
from libsym.channel.handshake import dial

VOCAB_SIZE = 300

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(libsym.__file__).parent.parent)}
"""Environment of the tests' programs: they import the tree's own libsym, and modules that tests share."""


@dataclass
class Daemon:
    path: str
    process: subprocess.Popen[bytes]

    def client(self) -> ClientChannel:
        return ClientChannel(*dial(self.path), self.path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start(path: Path, vocab_size: int = VOCAB_SIZE) -> Daemon:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        command = [sys.executable, "-m", "tests.libsym.echo_daemon", str(listening.fileno()), str(vocab_size)]
        return Daemon(str(path), subprocess.Popen(command, pass_fds=[listening.fileno()], env=ENVIRONMENT))


def statistics(channel: ClientChannel) -> dict[str, object]:
    found: dict[str, object] = json.loads(channel.call(Op.STAT).payload)
    return found


def wait_until(channel: ClientChannel, name: str, value: object) -> None:
    """Asks the daemon until it says so; the test's own timeout ends a wait for nothing."""
    while statistics(channel)[name] != value:
        pass
