"""The directory `/kv/fleet` of whole daemons, used from shells and by programs."""

import errno
import os
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from tests.symphony.fleets import Fleet
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

WRITE = "kv = sym.kv_create('a.kv'); kv.write(list(range(10, 250)))"


@pytest.fixture
def fleet(tmp_path):
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def shell(daemon, command):
    """Output of a command in the mount, errors included."""
    done = subprocess.run(
        command, shell=True, cwd=daemon.mount, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def length(daemon, path):
    return int(daemon.run(f"print(len(sym.kv_open({path!r})))"))


def test_shells_and_programs_of_two_machines_use_the_same_files(fleet):
    east, west = fleet.start("east", copies=2), fleet.start("west", copies=2)
    east.run(WRITE)
    assert shell(east, "mkdir fleet/d; cp a.kv fleet/d/a.kv; sync fleet/d/a.kv") == ""
    assert shell(west, "ls fleet/.versions").count("\n") == 1, "a sync returns when two machines have the version"
    assert shell(west, "md5sum < fleet/d/a.kv") == shell(east, "md5sum < a.kv")
    assert length(west, "fleet/d/a.kv") == 240
    assert shell(west, "cp fleet/d/a.kv fleet/b.kv; sync fleet/b.kv; mv fleet/d fleet/e; tar cf /dev/null fleet") == ""
    assert shell(east, "stat -c '%n %s' fleet/b.kv fleet/e/a.kv; cmp fleet/b.kv a.kv") == (
        "fleet/b.kv 71552\nfleet/e/a.kv 71552\n"
    )
    assert "cannot create directory" in shell(east, "mkdir fleet/e")
    assert "Operation not supported" in shell(west, "echo text > t; cp t fleet/text")
    assert "Operation not supported" in shell(west, "cat t > fleet/b.kv")
    eventually(lambda: length(west, "fleet/b.kv") == 240)  # the version is back when the file is closed
    assert "Device or resource busy" in shell(east, "mv fleet f")
    assert "Operation not permitted" in shell(east, "ln fleet/b.kv fleet/c.kv")
    assert "Operation not supported" in shell(east, "setfattr -n user.a -v 1 fleet/b.kv")
    east.run("f = sym.kv_fork(sym.kv_open('a.kv'), 'fleet/f.kv'); f.write([1, 2]); sym.kv_sync()")
    assert length(west, "fleet/f.kv") == 242
    status = west.symphony("fleet", "status").stdout.splitlines()
    assert status[-1] == "/fleet has 5 names, changes of the other machines arrive; 0 copies are missing"
    assert shell(west, "rm -r fleet/*; ls -A fleet") == ".versions\n"
    assert shell(east, "ls -A fleet") == ".versions\n"
    eventually(lambda: not shell(east, "ls fleet/.versions") + shell(west, "ls fleet/.versions"))
    assert (east.stop(), west.stop()) == (0, 0)
    for daemon in (east, west):
        assert "Traceback" not in daemon.log.read_text()


def test_a_reader_of_an_empty_file_sees_its_end_when_another_machine_syncs_the_first_version(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    shell(east, ": > fleet/a.kv")
    read = "exec 3< fleet/a.kv; echo open; read _; cat <&3 | wc -c; wc -c < fleet/a.kv"
    reader = subprocess.Popen(
        ["sh", "-c", read], cwd=west.mount, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "open\n"
    east.run(WRITE)
    shell(east, "cat a.kv > fleet/a.kv; sync fleet/a.kv")
    assert length(west, "fleet/a.kv") == 240
    found, _ = reader.communicate("\n", timeout=60)
    assert found.split() == ["0", "71552"]
    assert "Traceback" not in west.log.read_text()


HOLD = """
kv = sym.kv_open('fleet/a.kv', 'rw')
kv.write([7] * 20); sym.kv_sync(kv); kv.write([8] * 30)
print('open', flush=True)
input()
"""


def test_a_machine_that_dies_costs_what_was_not_synced_and_a_stop_costs_nothing(fleet):
    east, west = fleet.start("east", copies=2), fleet.start("west", copies=2)
    east.run(WRITE)
    shell(east, "cp a.kv fleet/a.kv; sync fleet/a.kv")
    program = east.program(HOLD)
    assert program.stdout.readline() == "open\n"
    east.process.kill()
    east.clean_up()
    program.kill()
    program.communicate()
    assert length(west, "fleet/a.kv") == 260
    east = fleet.start("east", copies=2)
    assert length(east, "fleet/a.kv") == 260
    eventually(
        lambda: "Busy" not in west.run("try: sym.kv_open('fleet/a.kv', 'rw')\nexcept sym.Busy: print('Busy')"), 30
    )
    program = east.program(HOLD)
    assert program.stdout.readline() == "open\n"
    assert east.stop() == 0
    program.kill()
    program.communicate()
    assert length(west, "fleet/a.kv") == 310, "a daemon that ends syncs what its programs have open"


def test_a_machine_that_was_asleep_does_not_write_over_a_newer_version(fleet):
    east, west = fleet.start("east"), fleet.start("west")
    east.run(WRITE)
    shell(east, "cp a.kv fleet/a.kv; sync fleet/a.kv")
    program = east.program(HOLD + "try: sym.kv_sync(kv)\nexcept sym.SymError as e: print(e.errno)\n")
    assert program.stdout.readline() == "open\n"
    assert length(west, "fleet/a.kv") == 260
    os.kill(east.process.pid, signal.SIGSTOP)
    try:
        until_s = time.monotonic() + 60
        while "Busy" in west.run(
            "try:\n kv = sym.kv_open('fleet/a.kv', 'rw'); kv.write([9]); sym.kv_sync(kv)\n"
            "except sym.Busy: print('Busy')"
        ):
            assert time.monotonic() < until_s
            time.sleep(0.5)
    finally:
        os.kill(east.process.pid, signal.SIGCONT)
    found, _ = program.communicate("\n", timeout=60)
    assert int(found) == errno.ESTALE
    assert (length(east, "fleet/a.kv"), length(west, "fleet/a.kv")) == (261, 261)
