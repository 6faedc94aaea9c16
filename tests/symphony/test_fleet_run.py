"""Programs on other machines of a fleet: whole daemons, with a real Ray on each machine."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from symphony.fleet.cluster import Cluster
from symphony.fleet.keys import make_keys_of_token
from tests.symphony.daemons import SYMPHONY
from tests.symphony.fleets import Fleet, free_port
from tests.symphony.launchers import PIPES, eventually

pytest.importorskip("ray", reason="NO RAY: pip install 'symphony-os[fleet]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # Ray starts twice
WITHIN_S = 180
"""Patience with a busy machine, on which each command needs seconds to import Ray."""


class Rays:
    """The machines east and west, with the Ray of one user. Each machine has its own home directory."""

    def __init__(self, directory, stack):
        self._stack, self._directory = stack, directory
        self.head = f"127.0.0.2:{free_port()}"
        self._processes = {}
        self._fleet = fleet = Fleet(directory, stack)
        self.east = self._start(fleet, "east")
        self._begin("east", "up", "--listen", self.head)
        self.west = self._start(fleet, "west")  # while Ray starts on east
        self._wait_for("east")
        self.files("west").mkdir(parents=True)
        shutil.copy(self.files("east") / "token", self.files("west"))
        self.join_west()

    def join_west(self):
        by_name = self.head.replace("127.0.0.2", "127.2")  # the certificate is for the address that it stands for
        self._begin("west", "join", by_name, "--listen", "127.0.0.3")
        self._wait_for("west")

    def start_beside(self, name):
        """Start a machine on which Ray runs already: here that of east. Return its daemon, and what Ray needs."""
        daemon = self._start(self._fleet, name)
        keys = next(self.files("east").glob("keys-*"))
        names = {"CA_CERT": "ca.pem", "SERVER_CERT": "machine.pem", "SERVER_KEY": "machine.key"}
        daemon.environment |= {f"RAY_TLS_{each}": str(keys / file) for each, file in names.items()}
        daemon.environment |= {"RAY_USE_TLS": "1", "RAY_AUTH_MODE": "token"}
        daemon.environment["RAY_AUTH_TOKEN_PATH"] = str(self.files("east") / "token")
        return daemon

    def files(self, name):
        return self._directory / f"{name}-state" / "symphony" / "fleet"

    def _start(self, fleet, name):
        daemon = fleet.start(name)
        daemon.environment["XDG_STATE_HOME"] = str(self._directory / f"{name}-state")
        return daemon

    def _begin(self, name, *words):
        command = [*SYMPHONY, "fleet", *words]
        environment = getattr(self, name).environment
        self._processes[name] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self._stack.callback(self.end, name)

    def _wait_for(self, name):
        assert line_of(self._processes[name].stdout) == f"symphony: {name} is in the Ray cluster at {self.head}\n"

    def kill(self, name):
        """Kill Ray on a machine, as the end of the machine would."""
        process = self._processes[name]
        node = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.kill()
        os.killpg(node, signal.SIGKILL)

    def end(self, name):
        process = self._processes[name]
        process.terminate()
        process.communicate(timeout=WITHIN_S)
        return process.returncode


@pytest.fixture(scope="module")
def rays(tmp_path_factory):
    with ExitStack() as stack:
        rays = Rays(tmp_path_factory.mktemp("rays"), stack)
        make_files(rays.east, rays.west)
        yield rays


FILES = [f"fleet/{number}.kv" for number in range(60)]
NEAR = [word for file in FILES for word in ("--near", file)]


def until_west_is_best(east):
    """Wait until the daemon sees the files, and does not count the last program that it has placed on west any more."""
    eventually(lambda: "west: all 120,000" in east.symphony("fleet", "place", *FILES).stdout, WITHIN_S)


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
    print(len(kv), sys.argv[1:], os.environ.get("COLOR"), os.nice(0))
    print("apart", file=sys.stderr)
sys.exit(3)
"""


def line_of(stream):
    assert stream is not None
    return stream.readline()


def test_a_program_runs_where_its_file_is_and_its_output_and_status_come_back(rays, tmp_path):
    until_west_is_best(rays.east)
    program = tmp_path / "count.py"
    program.write_text(PROGRAM)
    words = ("--env", "COLOR=blue", "--name", "counted", program, "x", "y z", "--", "-v")
    done = rays.east.symphony("run", "--fleet", *NEAR, *words, check=False)
    assert (done.returncode, done.stdout) == (3, f"2000 ['x', 'y z', '--', '-v'] blue {os.nice(0)}\n"), done.stderr
    placed, named, written = done.stderr.splitlines()[-3:]
    assert placed.endswith("count.py runs on west: all 120,000 entries of the files are there")
    assert named.endswith("count.py is west:counted")
    assert written == "apart"
    assert "counted" in rays.west.symphony("ps", "--all").stdout


LONG = """
import signal, sys, time
def end(number, frame):
    print("signal", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.fixture
def long(tmp_path):
    program = tmp_path / "long.py"
    program.write_text(LONG)
    return program


def is_followed(ident):
    """Whether a command on its machine reads the log of a program."""
    done = subprocess.run(["pgrep", "-f", f"logs --follow -- {ident}"], check=False, capture_output=True)
    return done.returncode == 0


def test_a_program_outlives_its_command_and_is_listed_read_signalled_and_waited_for_by_its_name(rays, long):
    east = rays.east
    command = subprocess.Popen([*SYMPHONY, "run", "--on", "west", long], env=east.environment, **PIPES)
    name = line_of(command.stderr).split()[-1]
    assert re.fullmatch(r"west:long\S*", name)
    assert line_of(command.stdout) == "begun\n"
    ident = next(
        each["id"]
        for each in json.loads(east.symphony("ps", "--fleet", "--json").stdout)
        if f"{each['machine']}:{each['name']}" == name
    )
    assert is_followed(ident)
    command.kill()
    command.communicate()
    eventually(lambda: not is_followed(ident), WITHIN_S)
    here = east.symphony("run", "--detach", long).stdout.strip()
    listed = east.symphony("ps", "--fleet").stdout
    assert name in listed
    assert f"east:{here}" in listed
    found = {(each["machine"], each["name"]) for each in json.loads(east.symphony("ps", "--fleet", "--json").stdout)}
    assert found >= {tuple(name.split(":")), ("east", here)}
    assert {*programs_of_top(east)} >= {tuple(name.split(":")), ("east", here)}
    east.symphony("kill", name)
    assert east.symphony("wait", name, check=False).stdout == "5\n"
    assert east.symphony("logs", name).stdout == "begun\nsignal 15\n"
    east.symphony("kill", here)


def programs_of_top(daemon):
    """The programs that `top --fleet` shows when it has heard of the machine west."""
    command = [*SYMPHONY, "top", "--fleet", "--json", "--interval", "0.5"]
    with subprocess.Popen(command, env=daemon.environment, stdout=subprocess.PIPE, text=True) as process:
        samples = (json.loads(line) for line in iter(lambda: line_of(process.stdout), ""))
        heard = next(each for each in samples if each["machines"]["west"]["rates"])
        process.terminate()
    assert heard["troubles"] == []
    return [(each["machine"], each["name"]) for each in heard["programs"]]


def test_a_person_without_the_token_runs_nothing(rays, long, tmp_path):
    other = Cluster(tmp_path / "symphony" / "fleet")
    other.make_token()
    make_keys_of_token(other.keys, other.token.read_bytes(), "127.0.0.2")
    (other.keys / "host").write_text("127.0.0.2")
    shutil.copy(rays.files("east") / "address", other.directory)
    environment = rays.east.environment | {"XDG_STATE_HOME": str(tmp_path)}
    command = [*SYMPHONY, "run", "--on", "west", long]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1
    assert "shows no certificate of this token" in done.stderr
    command = [*SYMPHONY, "fleet", "status"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=WITHIN_S)
    assert "shows no certificate of this token" in done.stdout.splitlines()[-1]
    assert rays.west.symphony("fleet", "status").stdout.endswith(f"Ray at {rays.head} answers\n")


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


def test_a_machine_that_ends_its_ray_joins_again_at_once(rays):
    assert rays.end("west") == 0
    rays.join_west()
    assert "usage:" in rays.east.symphony("run", "--on", "west", "ask", "--help").stdout


def test_a_ray_that_runs_already_runs_programs_until_its_machine_leaves(rays, long):
    north = rays.start_beside("north")
    words = ("fleet", "join", rays.head, "--running")
    with subprocess.Popen([*SYMPHONY, *words], env=north.environment, **PIPES) as joined:
        assert line_of(joined.stdout) == f"symphony: north is in the Ray cluster at {rays.head}\n"
        again = north.symphony(*words, check=False)
        assert (again.returncode, again.stderr) == (1, "symphony: your Ray runs already on north\n")
        name = rays.east.symphony("run", "--on", "north", "--detach", long).stdout.strip()
        eventually(lambda: rays.east.symphony("logs", name).stdout == "begun\n", WITHIN_S)
        rays.east.symphony("kill", name)
        for each in [each for each in north.environment if each.startswith("RAY_")]:
            del north.environment[each]  # the machine has noted them
        assert north.symphony("wait", name.removeprefix("north:"), check=False).stdout == "5\n"
        assert "usage:" in north.symphony("run", "--on", "west", "ask", "--help").stdout
        joined.terminate()
        assert joined.wait(WITHIN_S) == 0
    refused = north.symphony(*words, check=False)
    assert refused.stderr.startswith(f"symphony: Ray at {rays.head} uses TLS: set RAY_USE_TLS=1"), refused.stderr
    gone = rays.east.symphony("run", "--on", "north", long, check=False)
    assert "north is not in your Ray cluster" in gone.stderr
    assert stat.S_IMODE((rays.files("north") / "running").stat().st_mode) == 0o600
    north.stop()  # else programs of other tests may be placed there


PARENT = """
import sys
import libsym as sym
with sym.kv_open("fleet/7.kv") as kv:
    child = sym.spawn("child.py", ["a b"], name="far", env={"COLOR": "blue"}, fleet=True, near=[kv, *sys.argv[1:]])
doomed = sym.spawn("child.py", name="doomed", env={"COLOR": "red"}, fleet=True, near=[*sys.argv[1:]])
print(child.name, flush=True)
sys.stdin.readline()
sym.kill(child)
sym.kill(doomed, 9)
print(sym.wait(child), sym.wait(doomed).reason)
"""
CHILD = """
import os, sys
import libsym as sym
print(sys.argv[1:], os.environ["COLOR"], len(sym.kv_open("fleet/7.kv")), flush=True)
"""


def test_a_program_spawns_near_its_files_and_kills_and_waits_for_the_program_there(rays, tmp_path):
    east, west = rays.east, rays.west
    until_west_is_best(east)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD + LONG)
    process = subprocess.Popen([*SYMPHONY, "run", "parent.py", *FILES], env=east.environment, cwd=tmp_path, **PIPES)
    assert line_of(process.stdout) == "far\n"
    eventually(lambda: "begun" in east.symphony("logs", "far").stdout, WITHIN_S)
    eventually(lambda: "begun" in east.symphony("logs", "doomed").stdout, WITHIN_S)
    assert {"far", "doomed"} <= {*west.symphony("ps").stdout.split()}
    output, errors = process.communicate("\n", timeout=WITHIN_S)
    assert output == "Ended(status=5, reason='exit') killed\n", errors
    eventually(lambda: "doomed" not in west.symphony("ps").stdout, WITHIN_S)
    for machine in (east, west):
        assert machine.symphony("logs", "far").stdout == "['a b'] blue 2000\nbegun\nsignal 15\n"


MOVES = """
import time
import libsym as sym
name = sym.daemon_stat()["fleet"]["machine"]
print(name, flush=True)
if name == "west":
    time.sleep(600)
"""


def test_a_program_starts_elsewhere_when_its_machine_dies_and_another_runs_on_without_ray(rays, long, tmp_path):
    """The last test of the machines: they end."""
    east, west = rays.east, rays.west
    until_west_is_best(east)
    stays = west.symphony("run", "--on", "east", "--detach", long).stdout.strip().removeprefix("east:")
    program = tmp_path / "moves.py"
    program.write_text(MOVES)
    command = [*SYMPHONY, "run", "--fleet", *NEAR, "--restart", "on-failure", program]
    process = subprocess.Popen(command, env=east.environment, **PIPES)
    assert line_of(process.stdout) == "west\n"
    rays.kill("west")
    west.stop()
    output, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, output) == (0, "east\n"), errors
    assert re.search(r"^symphony: west does not answer.*; \S+moves.py starts again$", errors, re.MULTILINE), errors
    listed = east.symphony("ps", "--fleet", check=False)
    assert (listed.returncode, "east:" in listed.stdout) == (1, True)
    assert re.search(r"^symphony: programs are missing: west does not answer", listed.stderr, re.MULTILINE)

    assert rays.end("east") == 0
    refused = east.symphony("run", "--on", "west", long, check=False)
    assert refused.returncode == 1
    assert re.search(r"^symphony: Ray at \S+ does not answer", refused.stderr, re.MULTILINE), refused.stderr
    assert stays in east.symphony("ps").stdout
    assert east.symphony("logs", stays).stdout == "begun\n"
    east.symphony("kill", stays)
    assert east.symphony("wait", stays, check=False).stdout == "5\n"
