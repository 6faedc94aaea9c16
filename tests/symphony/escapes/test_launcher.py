"""Launcher, zygote and a sandbox's first process do nothing for a program that it can't do itself."""

import json
import shutil
import socket
import subprocess

import pytest

from tests.symphony.escapes.house import NONE, STANDARD
from tests.symphony.launchers import eventually

SLEEPS = "print(json.dumps(os.getpid()), flush=True)\nsignal.pause()"
USERS = ("root", "ann")


@pytest.fixture(params=USERS)
def user(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def neighbour(user):
    """Another program of the same user, in a sandbox of its own; it has to live on."""
    user.run(STANDARD, "-d", "--name", "neighbour", user.script(SLEEPS))
    eventually(lambda: user.symphony("logs", "neighbour").stdout)
    zygote = user.zygote
    yield
    assert user.zygote == zygote, "the zygote was lost, and all programs with it"
    (found,) = [each for each in json.loads(user.symphony("ps", "--json").stdout) if each["name"] == "neighbour"]
    assert found["program"] is not None
    user.symphony("kill", "neighbour")
    user.symphony("wait", "neighbour", check=False)


WRITES = """
import struct
garbage = b"x", b"\\x00" * 5, b"\\xff" * 4096
forged_statuses = [struct.pack("=qi", launch, 9) for launch in range(2000)]
for number in range(3, 64):
    for said in (*garbage, *forged_statuses):
        try: os.write(number, said)
        except OSError: pass
print(json.dumps("wrote"), flush=True)
"""


@pytest.mark.slow
def test_what_a_program_writes_to_descriptors_that_it_finds_reaches_no_other(user, neighbour):
    user.says(STANDARD, WRITES)
    done = user.run(STANDARD, user.script("sys.exit(7)"), check=False)
    assert done.returncode == 7, done.stderr


ENDS_INIT = """
import ctypes
room = (ctypes.c_uint64 * 2)
libc = ctypes.CDLL(None)
for which in range(16):
    libc.prlimit(1, which, room(0, 0), None)
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for _ in range(20):
    if os.fork() == 0:
        os._exit(0)
print(json.dumps("tried"), flush=True)
time.sleep(0.2)
sys.exit(5)
"""


@pytest.mark.slow
def test_a_program_that_harms_the_first_process_of_its_sandbox_ends_itself_at_most(user, neighbour):
    done = user.run(STANDARD, user.script(ENDS_INIT), check=False)
    assert done.stdout == '"tried"\n', done.stderr
    assert done.returncode in (5, 137), done.stderr


SPAWNS = """
from libsym.abi import Op
from libsym.channel.process import process
world, found = json.loads(sys.argv[1]), {}
child, home = os.path.dirname(os.path.abspath(sys.argv[0])) + "/child.py", world["home"]
def tried(name, spawn):
    try: found[name] = sym.wait(spawn()).status
    except OSError as error: found[name] = type(error).__name__
def raw(**wider):
    message = json.dumps({"program": child, "args": [sys.argv[1]], **wider}).encode()
    return json.loads(process.channel().call(Op.SPAWN, payload=message).payload)["id"]
tried("outside", lambda: sym.spawn(world["outside"]))
python = {"PYTHONPATH": home, "LD_PRELOAD": home + "/x.so", "PYTHONSTARTUP": world["secret"]}
places = {"SYMPHONY_SOCKET": world["daemon"], "XDG_RUNTIME_DIR": world["runtime"]}
for asked in ({}, {"cwd": home}, {"env": python}, {"env": places}, {"detached": True}):
    tried(str(asked), lambda: sym.spawn(child, [sys.argv[1]], **asked))
wider = {"isolation": "none", "binds": [["/", True]], "shows": ["/"], "venv": "/"}
for key, value in {**wider, "allow_net": [["127.0.0.1", world["tcp"]]]}.items():
    tried("raw " + key, lambda: raw(**{key: value}))
print(json.dumps(found))
"""
CHILD = """
import json, os, socket, sys
world, got = json.loads(sys.argv[1]), []
def local(path):
    return socket.socket(socket.AF_UNIX).connect(path)
for way, where in ((open, "secret"), (open, "ssh"), (local, "docker"), (local, "daemon")):
    try: got.append(way(world[where]))
    except OSError: pass
try: got.append(socket.create_connection(("127.0.0.1", world["tcp"]), 2))
except OSError: pass
sys.exit(42 if got else 41)
"""
ESCAPED, CONFINED = 42, 41


@pytest.mark.slow
def test_programs_that_it_spawns_have_its_sandbox_whatever_it_asks_for(user):
    program = user.script(SPAWNS)
    (program.parent / "child.py").write_text(CHILD)
    outside = user.outside.directory / "outside.py"
    outside.write_text("import sys; sys.exit(42)")
    outside.chmod(0o755)
    world = json.dumps(user.world | {"outside": str(outside)})
    found = json.loads(user.run(STANDARD, program, world).stdout)
    without = json.loads(user.run(NONE, program, world).stdout)
    assert without["{}"] == without["outside"] == ESCAPED
    assert found["{}"] == CONFINED
    assert {name: how for name, how in found.items() if how == ESCAPED} == {}
    assert found["outside"] != 0


@pytest.mark.slow
def test_spawning_does_not_tell_what_files_there_are_outside(user):
    source = """
def told(path):
    try: return sym.wait(sym.spawn(path)).status
    except OSError as error: return [type(error).__name__, str(error).replace(path, "")]
print(json.dumps([told(path) for path in sys.argv[1:]]))
"""
    there, not_there = user.outside.secret, user.outside.secret.with_name("secret-not")
    home, no_home = user.outside.home / ".ssh", user.outside.home / ".ssh-not"
    found = user.says(STANDARD, source, there, not_there, home, no_home)
    assert found[0] == found[1]
    assert found[2] == found[3]


GAINS = """
import subprocess
print(json.dumps(subprocess.run(sys.argv[1:], capture_output=True, text=True).stdout))
"""
WHO = '#include <stdio.h>\n#include <unistd.h>\nint main(void) { printf("%d %d", (int)geteuid(), (int)getegid()); }'


@pytest.mark.slow
def test_a_set_uid_program_gives_nothing(ann, tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO SET-UID PROGRAM TESTED: there is no gcc")
    where = ann.outside.directory / "setuid"
    where.mkdir(exist_ok=True)
    program = where / "who"
    subprocess.run([compiler, "-x", "c", "-", "-o", program], input=WHO, text=True, check=True)
    program.chmod(0o6755)
    assert ann.says(NONE, GAINS, program) == "0 0", "the control: it gives root"
    assert ann.says(STANDARD, GAINS, program, options=["--bind", where]) == f"{ann.uid} {ann.uid}"


@pytest.mark.slow
def test_what_a_users_python_path_names_is_not_the_users_home(ann, monkeypatch):
    """A dot in PYTHONPATH, or the home itself, is what many have: it must not show all that is there."""
    home = ann.outside.home
    monkeypatch.setitem(ann.environment, "PYTHONPATH", f"{ann.environment['PYTHONPATH']}:{home}")
    assert ann.says(STANDARD, "print(json.dumps(os.path.exists(sys.argv[1])))", home / ".ssh/id_rsa") is False


CONNECTS = """
import socket
print(json.dumps([socket.socket(socket.AF_UNIX).connect_ex(path) == 0 for path in sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_program_started_near_sockets_of_the_machines_reaches_none_of_them(house, ann):
    world = ann.world
    for cwd, path in ((ann.runtime.parent, world["docker"]), (house.directory, world["daemon"])):
        assert ann.says(STANDARD, CONNECTS, path, world["other_socket"], cwd=cwd) == [False, False]
    refused = ann.run(STANDARD, ann.script(CONNECTS), world["daemon"], cwd=ann.launcher / "programs", check=False)
    assert (refused.returncode, refused.stdout) == (127, ""), refused.stderr


@pytest.mark.slow
def test_with_a_terminal_of_its_own_it_types_nothing(user):
    names = [f"{each}_streams" for each in ("pushes_into_its", "pastes_into_its")]
    names += ["pushes_by_a_wide_number", "changes_their_discipline"]
    found = user.tries(STANDARD, *names, options=["--tty"])
    assert {name: row["got"] for name, row in found.items()} == dict.fromkeys(names)


def test_a_host_that_is_allowed_is_the_only_one(ann):
    """A grant is for one host and port; UDP, raw sockets and all other ports stay closed."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        allowed = f"127.0.0.1:{listening.getsockname()[1]}"
        names = ["tcp", "tcp6", "other_families", "abstract_socket", "docker_socket"]
        found = ann.tries(STANDARD, *names, options=["--allow-net", allowed])
    assert {name: row["got"] for name, row in found.items() if row["got"]} == {}
