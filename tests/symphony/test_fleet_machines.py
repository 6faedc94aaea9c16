"""Two whole daemons that find each other in a real etcd."""

import json
import socket
import subprocess
from contextlib import ExitStack

import pytest

from tests.symphony.daemons import SYMPHONY, Daemon
from tests.symphony.etcd import EtcdServer
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow


class Fleet:
    """An etcd, and keys for the machines `east` and `west`."""

    def __init__(self, directory, stack):
        self._directory, self._stack = directory, stack
        subprocess.run([*SYMPHONY, "fleet", "keys", directory / "keys", "east", "west"], check=True)
        self.etcd = EtcdServer(directory)
        stack.callback(self.etcd.kill)

    def options(self, name, keys=""):
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = "{}:{}".format(*free.getsockname())
        key_directory = str(self._directory / "keys" / (keys or name))
        return ["--machine", name, "--peer-listen", where, "--peer-keys", key_directory, "--etcd", self.etcd.url]

    def start(self, name):
        (self._directory / name).mkdir(exist_ok=True)
        daemon = Daemon(self._directory / name, "--model", "tiny", *self.options(name))
        self._stack.callback(daemon.clean_up)
        return daemon

    def refusal(self, *options):
        """The last line of a daemon that does not start."""
        state, mount = self._directory / "third", self._directory / "third-kv"
        command = [*SYMPHONY, "serve", "--model", "tiny", "--state", state, "--mount", mount, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]


@pytest.fixture
def fleet(tmp_path):
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def machines(daemon):
    return json.loads(daemon.symphony("fleet", "status", "--json").stdout)["machines"]


def trouble(daemon):
    return json.loads(daemon.symphony("fleet", "status", "--json").stdout)["trouble"]


def test_machines_find_each_other_in_etcd_and_fetch_files(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    assert list(machines(west)) == ["east", "west"]
    east.run("kv = sym.kv_create('a.kv'); kv.write(list(range(10, 250)))")
    west.symphony("fleet", "fetch", "east", "a.kv")
    assert west.run("print(len(sym.kv_open('a.kv')))") == "240\n"
    lines = west.symphony("fleet", "status").stdout.splitlines()
    assert lines[0] == f"fleet default, this machine is west: etcd answers at {fleet.etcd.url}"
    assert [line.split()[0] for line in lines[1:]] == ["MACHINE", "east", "west*"]
    assert lines[2].split()[2:4] == ["tiny", "same"]
    metrics = (west.mount / ".symphony" / "metrics").read_text().splitlines()
    assert {"symphony_fleet_machines 2", "symphony_fleet_connected 1"} <= set(metrics)
    assert "fleet    default: 2 machines, etcd answers" in west.symphony("stat").stdout
    assert east.stop() == 0
    eventually(lambda: list(machines(west)) == ["west"])
    refused = west.symphony("fleet", "fetch", "east", "a.kv", "b.kv", check=False)
    assert "there is no peer east" in refused.stderr
    assert west.stop() == 0
    for daemon in (east, west):
        assert "Traceback" not in daemon.log.read_text()


def test_the_second_daemon_of_a_name_does_not_start_unless_it_is_the_same_one_again(fleet):
    east = fleet.start("east")
    assert "has another machine east, at 127.0.0.1:" in fleet.refusal(*fleet.options("east"))
    east.process.kill()
    east.clean_up()
    again = fleet.start("east")  # with the same state, while the record of before is still there
    assert list(machines(again)) == ["east"]
    assert again.stop() == 0


def test_a_daemon_with_the_keys_of_another_machine_does_not_start(fleet):
    assert "no peer would take this daemon for east" in fleet.refusal(*fleet.options("east", keys="west"))


def test_a_daemon_goes_on_while_etcd_is_gone_and_is_back_in_the_fleet_afterwards(fleet):
    fleet.etcd.kill()
    east = fleet.start("east")
    assert f"{fleet.etcd.url}: Connection refused" in trouble(east)
    fleet.etcd.start()
    eventually(lambda: list(machines(east)) == ["east"])
    west = fleet.start("west")
    assert list(machines(west)) == ["east", "west"]
    fleet.etcd.kill()
    eventually(lambda: trouble(west))
    assert list(machines(west)) == ["east", "west"]
    east.run("kv = sym.kv_create('a.kv'); kv.write(list(range(10, 250)))")
    west.symphony("fleet", "fetch", "east", "a.kv")
    east.process.kill()
    fleet.etcd.start()
    eventually(lambda: not trouble(west) and list(machines(west)) == ["west"], 60)  # etcd began all leases anew
    assert west.stop() == 0
    assert west.log.read_text().count("etcd does not answer") == 1


def test_a_daemon_without_a_fleet_says_so(start_daemon):
    daemon = start_daemon("--model", "tiny")
    refused = daemon.symphony("fleet", "status", check=False)
    assert refused.stderr == "symphony: this daemon is in no fleet: see `etcd` in symphony.toml(5)\n"
    assert refused.returncode == 1
