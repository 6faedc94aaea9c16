"""A router that follows a whole daemon."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.symphony.fleet.routers import Router
from tests.symphony.fleets import free_port
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

TINY = "--model", "tiny", "--kv-memory", "64M"
MAKE = """
kv = sym.kv_create(sys.argv[1], mode=int(sys.argv[2], 8))
sym.pred(kv, list(range(10, 110)))
"""
GO_ON = "list(sym.generate(sym.kv_open('handbook.kv', 'a'), [7], max_tokens=40, stop_at_end=False))"
PROMPT = range(10, 110)


def libraries(daemon):
    """The shared libraries of ZeroMQ and msgpack that a daemon has loaded."""
    lines = Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
    return {name for name in ("_zmq.", "_cmsgpack.") if any(name in line for line in lines)}


def test_a_router_follows_what_programs_compute_share_and_remove_and_a_restart(start_daemon):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    options = *TINY, "--machine", "east", "--fleet-events", endpoint
    daemon = start_daemon(*options)
    assert libraries(daemon) == {"_zmq.", "_cmsgpack."}
    with closing(Router(endpoint)) as router:
        eventually(router.read)
        assert not router.blocks
        daemon.run(MAKE, "mine.kv", "600")
        daemon.run(MAKE, "handbook.kv", "644")
        eventually(lambda: router.read() and router.num_known(PROMPT) == 96)
        daemon.run(GO_ON)
        eventually(lambda: router.read() and len(router.blocks) == 4)
        assert router.topics == {"kv@east@tiny"}
    assert daemon.stop() == 0
    daemon = start_daemon(*options)
    with closing(Router(endpoint)) as late:
        eventually(lambda: late.read() and late.num_known(PROMPT) == 96)
        (daemon.mount / "handbook.kv").rename(daemon.mount / "renamed.kv")
        (daemon.mount / "renamed.kv").chmod(0o640)
        eventually(lambda: late.read() and not late.blocks)
        (daemon.mount / "mine.kv").chmod(0o644)
        eventually(lambda: late.read() and late.num_known(PROMPT) == 96)
        (daemon.mount / "mine.kv").unlink()
        eventually(lambda: late.read() and not late.blocks)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_a_daemon_without_the_key_loads_nothing_of_it(start_daemon):
    assert libraries(start_daemon(*TINY)) == set()


def test_a_daemon_without_the_packages_says_what_to_install(tmp_path):
    hidden = "import sys; sys.modules['msgpack'] = None; from symphony.cli import main; sys.exit(main())"
    places = "--mount", tmp_path / "kv", "--state", tmp_path / "state", "--socket", tmp_path / "socket"
    command = [sys.executable, "-c", hidden, "serve", *TINY, *places, "--fleet-events", f"ipc://{tmp_path}/events"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'symphony-os[fleet]'" in done.stderr
