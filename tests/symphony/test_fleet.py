"""Two whole daemons of one machine as peers."""

import socket
import subprocess
from contextlib import ExitStack

import pytest

from tests.symphony.daemons import SYMPHONY, Daemon

ROW = """
    import numpy as np
    kv = sym.kv_open(sys.argv[1], "rw")
    print(len(kv), np.asarray(sym.pred(kv.fork(), [5, 6]).logits).tobytes().hex())
"""


@pytest.fixture
def peers(tmp_path):
    """A daemon `east`, and a daemon that may fetch its files."""
    subprocess.run([*SYMPHONY, "fleet", "keys", tmp_path / "keys", "east", "west"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = "{}:{}".format(*free.getsockname())
    options = {"east": ("--peer-listen", where), "west": ("--peers", f"east={where}")}
    with ExitStack() as stack:
        running = []
        for name, words in options.items():
            (tmp_path / name).mkdir()
            keys = str(tmp_path / "keys" / name)
            running.append(Daemon(tmp_path / name, "--model", "tiny", *words, "--peer-keys", keys))
            stack.callback(running[-1].clean_up)
        yield running
        for daemon in running:
            assert daemon.stop() == 0, daemon.log.read_text()
            assert "Traceback" not in daemon.log.read_text()


@pytest.mark.slow
def test_a_program_goes_on_here_with_what_was_computed_there(peers):
    east, west = peers
    east.run("kv = sym.kv_create('a.kv'); kv.write(list(range(10, 250)))")
    west.symphony("fleet", "fetch", "east", "a.kv")
    west.symphony("fleet", "fetch", "east", "a.kv", "b.kv")
    assert west.run(ROW, "a.kv") == west.run(ROW, "b.kv") == east.run(ROW, "a.kv")
    assert west.stat()["peers"] == {"names": ["east"], "pages_received": 7, "pages_sent": 0}
    assert east.stat()["peers"]["pages_sent"] == 7
    refused = west.symphony("fleet", "fetch", "east", "none.kv", check=False)
    assert (refused.returncode, refused.stderr) == (1, "symphony: east: none.kv: no such file\n")
    assert west.symphony("fsck").returncode == 0


@pytest.mark.slow
def test_a_daemon_whose_keys_are_missing_does_not_start(tmp_path):
    done = subprocess.run(
        [*SYMPHONY, "serve", "--model", "tiny", "--state", tmp_path, "--mount", tmp_path / "kv", "--peers", "a=b:1"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no keys for peers" in done.stderr.splitlines()[-1]
