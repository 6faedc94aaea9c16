"""Two whole daemons that find each other in a real etcd."""

import json
from contextlib import ExitStack

import pytest

from tests.symphony.daemons import SYMPHONY
from tests.symphony.fleets import Fleet
from tests.symphony.launchers import PIPES, eventually, started

pytestmark = pytest.mark.slow


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
    assert [line.split()[0] for line in lines[1:]] == ["MACHINE", "east", "west*", "/fleet"]
    assert lines[2].split()[1] == "serves"
    assert lines[2].split()[3:5] == ["tiny", "same"]
    metrics = (west.mount / ".symphony" / "metrics").read_text().splitlines()
    assert {"symphony_fleet_machines 2", "symphony_fleet_connected 1", "symphony_peer_pages_received_total 7"} <= {
        *metrics
    }
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
    for once in ("fleet default: etcd does not answer", "changes of names do not arrive: etcd does not answer"):
        assert west.log.read_text().count(once) == 1


def test_a_machine_is_drained_and_leaves_by_commands(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    east.run("f = sym.kv_create('fleet/a.kv'); f.write(list(range(10, 250))); sym.kv_sync(f)")
    eventually(lambda: " 1      1      0 " in west.symphony("fleet", "status").stdout.splitlines()[2])
    assert west.symphony("fleet", "drain", "--cancel", "east").stdout == "east stays\n"
    refused = west.symphony("fleet", "drain", "", check=False)
    assert (refused.returncode, "'' is no name of a machine" in refused.stderr) == (2, True)
    drained = west.symphony("fleet", "drain", "east").stdout.splitlines()
    assert drained[0] == "east has 1 version, and writes 0 files"
    assert drained[-1] == "east can go: the fleet needs none of its files"
    assert "drained" in west.symphony("fleet", "status").stdout
    refused = json.loads(west.symphony("fleet", "place", "--json").stdout)["machines"]["east"]["refusal"]
    assert refused == "it is drained"
    refused = west.symphony("run", "--on", "east", "ask", "x", check=False)
    assert refused.stderr.splitlines()[-1] == "symphony: east is drained: it gets no more programs"
    refused = west.symphony("fleet", "leave", "east", check=False)
    assert "symphony fleet leave, on east" in refused.stderr
    assert east.symphony("fleet", "leave").stdout == "east has left the fleet default\n"
    eventually(lambda: list(machines(west)) == ["west"])
    assert "has left the fleet" in trouble(east)
    refused = east.symphony("fleet", "leave", check=False)
    assert "a restart of the daemon brings it back" in refused.stderr
    assert west.run("print(len(sym.kv_open('fleet/a.kv')))") == "240\n"
    metrics = (west.mount / ".symphony" / "metrics").read_text().splitlines()
    assert {"symphony_fleet_versions 1", "symphony_fleet_copies_missing 0", "symphony_fleet_drained 0"} <= set(metrics)
    refused = west.symphony("fleet", "drain", check=False)
    assert "no other machine stays" in refused.stderr
    assert (west.stop(), east.stop()) == (0, 0)
    east = fleet.start("east")
    assert list(machines(east)) == ["east"]
    for daemon in (east, west):
        assert "Traceback" not in daemon.log.read_text()


def test_a_drain_outlives_daemons_and_goes_on_when_a_dead_machine_is_back(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    east.run("f = sym.kv_create('fleet/a.kv'); f.write(list(range(10, 250))); sym.kv_sync(f)")
    east.process.kill()
    east.clean_up()
    process = started([*SYMPHONY, "fleet", "drain", "east"], env=west.environment, **PIPES)
    said = next(line for line in process.stdout if "it is away" in line)
    assert "no other machine has 1 of them: start it, or give them up by symphony fleet leave --force east" in said
    west.process.kill()
    assert "symphony: the drain of east goes on, but the daemon at" in process.communicate(timeout=60)[1]
    west.clean_up()
    east, west = fleet.start("east"), fleet.start("west")
    drained = west.symphony("fleet", "drain", "east").stdout.splitlines()
    assert drained[-1] == "east can go: the fleet needs none of its files"
    assert (east.stop(), west.run("print(len(sym.kv_open('fleet/a.kv')))")) == (0, "240\n")
    for daemon in (east, west):
        assert "Traceback" not in daemon.log.read_text()


def test_a_daemon_without_a_fleet_says_so(start_daemon):
    daemon = start_daemon("--model", "tiny")
    refused = daemon.symphony("fleet", "status", check=False)
    assert refused.stderr == "symphony: this daemon is in no fleet: see `etcd` in symphony.toml(5)\n"
    assert refused.returncode == 1
