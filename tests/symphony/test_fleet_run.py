"""Programs on other machines of a fleet: whole daemons, with a real Ray on each machine."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.symphony.daemons import SYMPHONY
from tests.symphony.fleets import Fleet, free_port
from tests.symphony.launchers import PIPES, eventually

ray = pytest.importorskip("ray", reason="NO RAY: pip install 'symphony-os[fleet]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # Ray starts twice


class Rays:
    """The machines east and west, with the Ray of one user. Each machine has its own home directory."""

    def __init__(self, directory, stack):
        self.fleet, self._stack, self._directory = Fleet(directory, stack), stack, directory
        self._host = ray.util.get_node_ip_address()
        self._head = f"{self._host}:{free_port()}"
        self.processes = {}
        self.east = self._start("east", "up", "--listen", self._head)
        self.west = self._start("west", "join", self._head, "--listen", self._host)

    def files(self, name):
        return self._directory / f"{name}-state" / "symphony" / "fleet"

    def _start(self, name, *words):
        daemon = self.fleet.start(name)
        daemon.environment["XDG_STATE_HOME"] = str(self._directory / f"{name}-state")
        if name == "west":
            self.files(name).mkdir(parents=True)
            shutil.copy(self.files("east") / "token", self.files(name))
        process = subprocess.Popen(
            [*SYMPHONY, "fleet", *words], env=daemon.environment, stdout=subprocess.PIPE, text=True
        )
        self.processes[name] = process
        self._stack.callback(self.end, name)
        assert line_of(process.stdout) == f"symphony: {name} is in the Ray cluster at {self._head}\n"
        return daemon

    def kill(self, name):
        """Kill all processes of a machine, as a power cut would."""
        process = self.processes[name]
        node = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.kill()
        for each in Path("/proc").glob("[1-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(each.name)) == node:
                    os.kill(int(each.name), signal.SIGKILL)
        getattr(self, name).clean_up()

    def end(self, name):
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        return process.returncode


@pytest.fixture(scope="module")
def rays(tmp_path_factory):
    with ExitStack() as stack:
        rays = Rays(tmp_path_factory.mktemp("rays"), stack)
        make_files(rays.east, rays.west)
        yield rays


@pytest.fixture
def own_rays(tmp_path):
    """Machines for a test that ends them."""
    with ExitStack() as stack:
        yield Rays(tmp_path, stack)


FILES = [f"fleet/{number}.kv" for number in range(60)]
NEAR = [word for file in FILES for word in ("--near", file)]


def until_west_is_best(east):
    """Wait until the daemon sees the files, and does not count the last program that it has placed on west any more."""
    eventually(lambda: "west: all 120,000" in east.symphony("fleet", "place", *FILES).stdout)


def make_files(east, west):
    """Make files on west: so many that no program is drawn to east, although the tiny model's entries are small."""
    west.run(
        """
        kv = sym.kv_create()
        kv.write([5] * 2000)
        for number in range(60):
            with sym.kv_fork(kv, f"fleet/{number}.kv") as fork:
                sym.kv_sync(fork)
        """
    )
    until_west_is_best(east)


PROGRAM = """
import os, sys
import libsym as sym
with sym.kv_open("fleet/7.kv") as kv:
    print(len(kv), sys.argv[1:], os.environ.get("COLOR"))
    print("apart", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_runs_where_its_file_is_and_its_output_and_status_come_back(rays, tmp_path):
    east, west = rays.east, rays.west
    until_west_is_best(east)
    program = tmp_path / "count.py"
    program.write_text(PROGRAM)
    run = ("run", "--fleet", *NEAR)
    done = east.symphony(*run, "--env", "COLOR=blue", "--name", "counted", program, "x", "y z", "--", "-v", check=False)
    assert (done.returncode, done.stdout) == (3, "2000 ['x', 'y z', '--', '-v'] blue\n"), done.stderr
    placed, named, written = done.stderr.splitlines()[-3:]
    assert placed.endswith("count.py runs on west: all 120,000 entries of the files are there")
    assert named.endswith("count.py is west:counted")
    assert written == "apart"
    assert "counted" in west.symphony("ps", "--all").stdout
    assert "counted" not in east.symphony("ps", "--all").stdout
    done = west.symphony(*run, program, check=False)
    assert (done.returncode, done.stdout) == (3, "2000 [] None\n")
    refused = east.symphony("run", "--on", "west", "--memory", "1", program, check=False)
    assert refused.returncode == 125
    assert refused.stderr.splitlines()[-1].startswith("symphony: west: ")
    assert east.symphony("run", "--on", "north", program, check=False).stderr.startswith(
        "symphony: north is not in your"
    )


def line_of(stream):
    assert stream is not None
    return stream.readline()


LONG = """
import signal, sys, time
def end(number, frame):
    print("signal", number, flush=True)
    sys.exit(5)
for each in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, end)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.fixture
def long(tmp_path):
    program = tmp_path / "long.py"
    program.write_text(LONG)
    return program


def test_a_program_of_another_machine_is_listed_read_signalled_and_waited_for_by_its_name(rays, long):
    east = rays.east
    name = east.symphony("run", "--on", "west", "--detach", long).stdout.strip()
    assert re.fullmatch(r"west:long\S*", name)
    here = east.symphony("run", "--detach", long).stdout.strip()
    listed = east.symphony("ps", "--fleet").stdout
    assert name in listed
    assert f"east:{here}" in listed
    found = {(each["machine"], each["name"]) for each in json.loads(east.symphony("ps", "--fleet", "--json").stdout)}
    assert found >= {tuple(name.split(":")), ("east", here)}
    eventually(lambda: east.symphony("logs", name).stdout == "begun\n")
    east.symphony("kill", name)
    assert east.symphony("wait", name, check=False).stdout == "5\n"
    assert east.symphony("logs", "-f", name).stdout == "begun\nsignal 15\n"
    gone = east.symphony("kill", name, check=False)
    assert (gone.returncode, gone.stderr) == (1, f"symphony: west: {name[5:]} has ended already\n")
    east.symphony("kill", here)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_passes_signals_on_and_ends_with_the_program(rays, long, number):
    command = subprocess.Popen([*SYMPHONY, "run", "--on", "west", long], env=rays.east.environment, **PIPES)
    assert line_of(command.stdout) == "begun\n"
    command.send_signal(number)
    assert command.communicate(timeout=60)[0] == f"signal {number}\n"
    assert command.returncode == 5


def test_a_program_runs_on_when_its_command_is_killed(rays, long):
    command = subprocess.Popen([*SYMPHONY, "run", "--on", "west", long], env=rays.east.environment, **PIPES)
    name = line_of(command.stderr).split()[-1]
    assert line_of(command.stdout) == "begun\n"
    command.kill()
    command.communicate()
    assert name in rays.east.symphony("ps", "--fleet").stdout
    rays.east.symphony("kill", name)
    assert rays.east.symphony("wait", name, check=False).stdout == "5\n"


def test_a_person_without_the_token_runs_nothing(rays, long, tmp_path):
    other = tmp_path / "symphony" / "fleet"
    shutil.copytree(rays.files("east"), other, ignore=shutil.ignore_patterns("programs-*"))
    (other / "token").write_text("0" * 64)
    environment = rays.east.environment | {"XDG_STATE_HOME": str(tmp_path)}
    command = [*SYMPHONY, "run", "--on", "west", long]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def test_the_sockets_of_ray_are_the_users_alone(rays):
    sockets = [
        each for line in Path("/proc/net/unix").read_text().splitlines()[1:] if "plasma" in (each := line.split()[-1])
    ]
    ours = [each for each in sockets if str(rays.west.runtime) in each]
    assert ours, sockets
    for each in ours:
        private = Path(each).parents[2]
        assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
        assert len(os.fsencode(each)) < 105


def test_a_second_ray_of_a_user_on_a_machine_is_refused(rays):
    done = rays.west.symphony("fleet", "join", "10.0.0.1:6379", "--listen", "10.0.0.2", check=False)
    assert (done.returncode, done.stderr) == (1, "symphony: your Ray runs already on west\n")


def test_a_program_runs_on_when_ray_has_ended_and_placement_says_so(own_rays, long):
    east, west = own_rays.east, own_rays.west
    run = ("run", "--on", "west", long)
    command = subprocess.Popen([*SYMPHONY, *run], env=east.environment, **PIPES)
    machine, _, name = line_of(command.stderr).split()[-1].partition(":")
    assert machine == "west"
    assert line_of(command.stdout) == "begun\n"
    assert own_rays.end("west") == 0
    errors = command.communicate(timeout=60)[1]
    assert command.returncode == 1
    assert re.search(r"^symphony: west does not answer", errors, re.MULTILINE), errors
    refused = east.symphony(*run, check=False)
    assert refused.returncode == 1
    assert re.search(r"^symphony: west (does not answer|is not in your Ray cluster)", refused.stderr, re.MULTILINE)
    assert own_rays.end("east") == 0
    assert name in west.symphony("ps").stdout
    assert west.symphony("logs", name).stdout == "begun\n"
    refused = east.symphony(*run, check=False)
    assert refused.returncode == 1
    assert re.search(r"^symphony: Ray at \S+ does not answer", refused.stderr, re.MULTILINE)
    west.symphony("kill", name)
    assert west.symphony("wait", name, check=False).stdout == "5\n"


PARENT = """
import sys
import libsym as sym
with sym.kv_open("fleet/7.kv") as kv:
    how = {"name": "far", "env": {"COLOR": "blue"}, "limits": {"tokens": 50}}
    child = sym.spawn("child.py", ["a b"], **how, fleet=True, near=[kv, *sys.argv[1:]])
print(child.name, flush=True)
if sys.stdin.readline() == "kill":
    sym.kill(child)
print(sym.wait(child))
"""
CHILD = """
import os, sys, time
import libsym as sym
print(sys.argv[1:], os.environ["COLOR"], sym.getrusage().tokens, len(sym.kv_open("fleet/7.kv")), flush=True)
try:
    sym.kv_write(sym.kv_create(), [1] * 60)
except sym.SymError as error:
    print("limited", flush=True)
"""


def test_a_program_spawns_near_its_files_and_waits_for_the_program_there(rays, tmp_path):
    east, west = rays.east, rays.west
    until_west_is_best(rays.east)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    command = [*SYMPHONY, "run", "parent.py", *FILES]
    done = subprocess.run(
        command, env=east.environment, cwd=tmp_path, check=True, input="\n", stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "far\nEnded(status=121, reason='exit')\n"
    assert "far" in east.symphony("ps", "--all").stdout
    assert "far" in west.symphony("ps", "--all").stdout
    assert west.symphony("logs", "far").stdout == "['a b'] blue 0 2000\nlimited\n"
    assert east.symphony("logs", "far").stdout == "['a b'] blue 0 2000\nlimited\n"


def test_a_signal_for_a_spawned_program_reaches_the_other_machine(rays, tmp_path):
    until_west_is_best(rays.east)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(LONG)
    command = [*SYMPHONY, "run", "parent.py", *FILES]
    process = subprocess.Popen(command, env=rays.east.environment, cwd=tmp_path, **PIPES)
    assert line_of(process.stdout) == "far\n"
    eventually(lambda: "begun" in rays.east.symphony("logs", "far").stdout)
    assert process.communicate("kill", timeout=60)[0] == "Ended(status=5, reason='exit')\n"


def test_a_program_starts_again_elsewhere_when_its_machine_dies(own_rays, tmp_path):
    east, west = own_rays.east, own_rays.west
    make_files(east, west)
    program = tmp_path / "where.py"
    program.write_text(
        "import time, libsym as sym\nname = sym.daemon_stat()['fleet']['machine']\nprint(name, flush=True)\n"
    )
    with program.open("a") as file:
        file.write("if name == 'west':\n    time.sleep(600)\n")
    command = [*SYMPHONY, "run", "--fleet", *NEAR, "--restart", "on-failure", program]
    process = subprocess.Popen(command, env=east.environment, **PIPES)
    assert line_of(process.stdout) == "west\n"
    own_rays.kill("west")
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "east\n"), errors
    assert re.search(r"^symphony: west does not answer.*; \S+where.py starts again$", errors, re.MULTILINE), errors
