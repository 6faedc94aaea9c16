"""Whole daemons of a fleet, with an etcd of their own."""

import random
import socket
import subprocess
from contextlib import suppress

from tests.symphony.daemons import SYMPHONY, Daemon
from tests.symphony.etcd import EtcdServer
from tests.workers import worker_number


def _ports():
    """Yield ports that neither the kernel nor Ray gives to other processes. Each worker of the tests has a part."""
    worker, num_workers = worker_number(), 8
    for port in random.sample(range(20_000 + worker % num_workers, 32_000, num_workers), 1_000):
        with suppress(OSError):
            socket.create_server(("", port)).close()
            yield port


free_port = _ports().__next__


class Fleet:
    """An etcd, and keys for the machines `east`, `north` and `west`."""

    def __init__(self, directory, stack):
        self._directory, self._stack = directory, stack
        subprocess.run([*SYMPHONY, "fleet", "keys", directory / "keys", "east", "north", "west"], check=True)
        self.etcd = EtcdServer(directory)
        stack.callback(self.etcd.kill)

    def options(self, name, keys="", copies=1):
        where = f"127.0.0.1:{free_port()}"
        key_directory = str(self._directory / "keys" / (keys or name))
        return [
            "--machine",
            name,
            "--peer-listen",
            where,
            "--peer-keys",
            key_directory,
            "--etcd",
            self.etcd.url,
            *("--copies", str(copies)),
        ]

    def start(self, name, *options, copies=1):
        (self._directory / name).mkdir(exist_ok=True)
        daemon = Daemon(self._directory / name, "--model", "tiny", *self.options(name, copies=copies), *options)
        self._stack.callback(daemon.clean_up)
        return daemon

    def refusal(self, *options):
        """The last line of a daemon that does not start."""
        state, mount = self._directory / "third", self._directory / "third-kv"
        command = [*SYMPHONY, "serve", "--model", "tiny", "--state", state, "--mount", mount, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]
