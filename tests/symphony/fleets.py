"""Whole daemons of a fleet, with an etcd of their own."""

import socket
import subprocess

from tests.symphony.daemons import SYMPHONY, Daemon
from tests.symphony.etcd import EtcdServer


class Fleet:
    """An etcd, and keys for the machines `east`, `north` and `west`."""

    def __init__(self, directory, stack):
        self._directory, self._stack = directory, stack
        subprocess.run([*SYMPHONY, "fleet", "keys", directory / "keys", "east", "north", "west"], check=True)
        self.etcd = EtcdServer(directory)
        stack.callback(self.etcd.kill)

    def options(self, name, keys="", copies=1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = "{}:{}".format(*free.getsockname())
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
