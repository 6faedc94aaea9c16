"""`symphony fleet place` and `fleet_place()` on whole daemons."""

import json
from contextlib import ExitStack

import pytest

from tests.symphony.fleets import Fleet
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

MAKE = "kv = sym.kv_create('a.kv'); kv.write(list(range(10, 250))); kv.close(); "


@pytest.fixture
def fleet(tmp_path):
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def placed(daemon, *files):
    return json.loads(daemon.symphony("fleet", "place", "--json", *files).stdout)


def test_commands_and_programs_learn_where_a_program_should_run(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    eventually(lambda: list(placed(east)["machines"]) == ["east", "west"])
    east.run(MAKE + "f = sym.kv_fork(sym.kv_open('a.kv'), 'fleet/a.kv'); sym.kv_sync(f)")
    for daemon in (east, west):
        found = placed(daemon, "fleet/a.kv")
        assert {name: each["entries"] for name, each in found["machines"].items()} == {"east": 240, "west": 0}
        assert all(not each["refusal"] and each["delay_s"] > 0 for each in found["machines"].values())
    assert west.run("print(len(sym.kv_open('fleet/a.kv')))") == "240\n"
    found = json.loads(east.run("import json; print(json.dumps(sym.fleet_place('fleet/a.kv')))"))
    assert {name: each["entries"] for name, each in found["machines"].items()} == {"east": 240, "west": 240}
    lines = east.symphony("fleet", "place", "a.kv").stdout.splitlines()
    assert lines[:2] == ["east: a.kv is a file of this machine alone", "MACHINE  ENTRIES  FREE  CALLS  DELAY"]
    assert lines[2].split()[:2] == ["east*", "240"]
    assert lines[3].split()[:2] == ["west", "0"]
    assert lines[3].endswith("a.kv is a file of east alone")
    refused = west.symphony("fleet", "place", "b.kv", check=False)
    assert (refused.returncode, refused.stderr) == (1, "symphony: b.kv: no such file\n")
    status = json.loads(west.symphony("fleet", "status", "--json").stdout)
    assert all(each["load"]["step_us"] > 0 for each in status["machines"].values())


def test_a_machine_that_computes_shows_load(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    program = east.program(
        """
        kv = sym.kv_create()
        while True:
            list(sym.generate(kv, [5], max_tokens=500, stop_at_end=False))
            kv.truncate(0)
        """
    )
    try:
        eventually(lambda: placed(west)["machines"]["east"]["calls"] >= 1)
        assert placed(west)["machines"]["west"]["calls"] == 0
    finally:
        program.kill()
        program.communicate()


def test_without_a_fleet_the_command_says_so(start_daemon):
    daemon = start_daemon("--model", "tiny")
    refused = daemon.symphony("fleet", "place", check=False)
    assert refused.stderr == "symphony: this daemon is in no fleet: see `etcd` in symphony.toml(5)\n"
