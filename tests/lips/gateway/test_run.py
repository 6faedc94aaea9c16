"""`symphony run gateway` is all that is typed."""

import json
import re
import signal
import subprocess

import httpx
import pytest

from lips.gateway.keys import VARIABLE
from tests.symphony.daemons import SYMPHONY

pytestmark = pytest.mark.slow


def test_symphony_runs_it_under_its_name_where_it_may_listen_and_ctrl_c_ends_it(gateway_daemon):
    command = [*SYMPHONY, "run", "gateway", "--port", "0"]
    environment = gateway_daemon.environment | {VARIABLE: "of-the-environment"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        try:
            url = running.stderr.readline().split()[1]
            assert running.stderr.readline() == f"gateway: {url}/#key=of-the-environment\n"
            assert running.stderr.readline() == f"gateway: http://[::1]:{url.rpartition(':')[2]}\n"
            assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
            programs = json.loads(gateway_daemon.symphony("ps", "--json").stdout)
            assert [each["isolation"] for each in programs if each["name"] == "gateway"] == ["none"]
        finally:
            running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0
    assert re.fullmatch(r"gateway: GET /health 200 total \d+\.\d{3} s\n", said)


def test_a_port_that_is_taken_is_named(gateway_daemon, gateway):
    port = gateway.url.rpartition(":")[2]
    done = gateway_daemon.symphony("run", "gateway", "--port", port, check=False)
    assert done.returncode == 1
    assert done.stderr == f"gateway: 127.0.0.1 port {port}: Address already in use\n"
