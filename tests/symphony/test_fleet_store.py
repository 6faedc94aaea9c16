"""Whole daemons of a fleet that share a Mooncake Store."""

from contextlib import ExitStack

import pytest

from tests.symphony.fleets import Fleet
from tests.symphony.launchers import eventually
from tests.symphony.mooncake import Master

pytestmark = pytest.mark.slow

NUM_PAGES = 7
LENGTH = "print(len(sym.kv_open('fleet/a.kv')))"


@pytest.fixture
def fleet(tmp_path):
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


@pytest.fixture
def master():
    master = Master()
    yield master
    master.kill()


def store_of(daemon):
    """The last line of `symphony fleet status`."""
    return daemon.symphony("fleet", "status").stdout.splitlines()[-1]


def test_a_version_that_one_machine_has_opened_comes_to_the_next_one_from_the_store(fleet, master):
    options = "--fleet-store", master.address, "--fleet-store-memory", "64M"
    east, west, north = (fleet.start(name, *options) for name in ("east", "west", "north"))
    for each in (east, west, north):
        eventually(lambda daemon=each: "it answers" in store_of(daemon))
    east.run(f"kv = sym.kv_create('fleet/a.kv'); kv.write(list(range({NUM_PAGES * 32}))); sym.kv_sync(kv)")
    assert west.run(LENGTH) == f"{NUM_PAGES * 32}\n"
    head = f"store {master.address}: it answers"
    eventually(lambda: store_of(west) == f"{head}, 0 pages came from it, {NUM_PAGES} were put")
    assert north.run(LENGTH) == west.run(LENGTH)
    assert store_of(north) == f"{head}, {NUM_PAGES} pages came from it, 0 were put"
    assert store_of(east) == f"{head}, 0 pages came from it, 0 were put"


def test_a_daemon_goes_on_when_the_store_is_gone(fleet, master):
    east, west = fleet.start("east"), fleet.start("west", "--fleet-store", master.address)
    eventually(lambda: "it answers" in store_of(west))
    east.run("kv = sym.kv_create('fleet/a.kv'); kv.write(list(range(100))); sym.kv_sync(kv)")
    master.kill()
    assert west.run(LENGTH) == "100\n"
    assert "it answers" not in store_of(west)
    assert west.log.read_text().count("pages come from peers") == 1
