"""A real master of Mooncake Store for tests, on loopback."""

import importlib.util
import socket
import subprocess
import time
from pathlib import Path

import pytest

READY_S = 30


class Master:
    """A master that is started and ready. `start` after `kill` is a master that has forgotten everything."""

    def __init__(self) -> None:
        if (found := importlib.util.find_spec("mooncake")) is None or found.origin is None:
            pytest.skip("STORE NOT TESTED: there is no Mooncake Store (PyPI's mooncake-transfer-engine-non-cuda)")
        with socket.create_server(("127.0.0.1", 0)) as rpc, socket.create_server(("127.0.0.1", 0)) as metrics:
            self._port, metrics_port = rpc.getsockname()[1], metrics.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        program = str(Path(found.origin).parent / "mooncake_master")
        self._command = [
            *(program, f"--rpc_port={self._port}", "--rpc_address=127.0.0.1"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                break
            except ConnectionRefusedError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)  # the master tells nobody that it is ready

    def kill(self) -> None:
        """End the master as `kill -9` does."""
        self.process.kill()
        self.process.wait()
