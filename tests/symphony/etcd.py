"""A real etcd for tests: one member on loopback, with a data directory of the test's own."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

READY_S = 30


class EtcdServer:
    """A member that is started and ready. `start` after `kill` is the same member again."""

    def __init__(self, directory: Path, *options: str, scheme: str = "http") -> None:
        if shutil.which("etcd") is None:
            pytest.skip("FLEET NOT TESTED: there is no etcd (Debian's etcd-server)")
        with socket.create_server(("127.0.0.1", 0)) as client, socket.create_server(("127.0.0.1", 0)) as peer:
            port, peer_port = client.getsockname()[1], peer.getsockname()[1]
        self.url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        self._command = [
            *("etcd", "--name", "m", "--data-dir", str(directory / "etcd"), "--logger", "zap"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"m={peer_url}", *options),
        ]
        self._log = directory / "etcd.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            at = log.tell()
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + READY_S
        while b"serving client traffic" not in self._log.read_bytes()[at:]:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.05)  # only the log says when a member is ready

    def kill(self) -> None:
        """End the member as `kill -9` does."""
        self.process.kill()
        self.process.wait()
