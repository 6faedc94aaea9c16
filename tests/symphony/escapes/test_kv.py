"""Another user's KV is out of a sandboxed program's reach: by calls, numbers, frames, pages, and measures of time."""

import json
import os

import pytest

from symphony.launcher.common.spec import SOCKET_INSIDE
from tests.symphony.escapes.house import PROGRAMS, ROOT, STANDARD
from tests.symphony.launchers import eventually

CALLS = PROGRAMS / "kv_calls.py"
SECRET = [7, 77, 177, 27, 127, 227, 97, 197] * 12
"""Three pages of tokens."""
OWNER = """
path, tokens = sys.argv[1], json.loads(sys.argv[2])
sym.kv_mkdir(os.path.dirname(path), 0o755, parents=True)
kv = sym.kv_create(path)
sym.kv_write(kv, tokens)
sym.kv_sync(kv)
print(json.dumps({"tokens": kv.read()[0], "id": os.environ["SYMPHONY_PROGRAM"]}), flush=True)
if len(sys.argv) == 3: signal.pause()
"""
READS = "print(json.dumps(sym.kv_read(sys.argv[1])[0]))"
NUM_FRAMES = 60_000
NOT_FOR_OWNERS = {"kv_fork over it", "chown"}
"""The name is taken; only root gives files away."""


def outcomes(user, what, path):
    done = user.run(STANDARD, CALLS, what, path)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def file(house, ann):
    """A file of Ann's, whose program lives and has it open; unharmed in the end."""
    os.chmod(house.daemon.mount, 0o1777)
    path = "ann/private.kv"
    ann.run(STANDARD, "-d", "--name", "owner", ann.script(OWNER), path, json.dumps(SECRET))
    said = eventually(lambda: ann.symphony("logs", "owner").stdout)
    yield {"path": path, **json.loads(said.splitlines()[0])}
    assert ann.says(STANDARD, READS, path) == SECRET
    ann.symphony("kill", "owner")


@pytest.mark.parametrize("what", ["calls", "mount"])
def test_each_call_does_something_for_the_owner_and_nothing_for_another_user(ann, bob, file, what):
    mine = f"ann/mine-{what}.kv"
    ann.run(STANDARD, ann.script(OWNER), mine, json.dumps(SECRET), "ends")
    owner, other = outcomes(ann, what, mine), outcomes(bob, what, file["path"])
    told_to_all = {"kv_list", "listing"}
    given = {name: row["got"] for name, row in other.items() if "got" in row and row["got"] != "None"}
    assert set(given) <= told_to_all, given
    refused = {name for name, row in owner.items() if "refused" in row}
    assert refused <= NOT_FOR_OWNERS, {name: owner[name] for name in refused - NOT_FOR_OWNERS}


def test_numbers_of_handles_of_other_programs_lead_nowhere(bob, file):
    assert {row["got"] for row in outcomes(bob, "handles", file["path"]).values()} == {"[]"}


def test_programs_of_other_users_are_neither_seen_nor_ended_nor_reached(bob, file):
    found = outcomes(bob, "programs", file["id"])
    assert all(row.get("got", "[]") == "[]" for row in found.values()), found


def test_frames_and_rings_that_are_broken_from_inside_a_sandbox_harm_nobody(house, ann, bob, file):
    daemon = house.daemon
    before = descriptors_of(daemon.process.pid)
    attacker = ROOT / "scripts/fuzz/frames.py"
    done = bob.run(STANDARD, attacker, "--attack", SOCKET_INSIDE, "--frames", NUM_FRAMES)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["leaks"] == []
    assert found["frames"] >= NUM_FRAMES
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log.read_text()
    eventually(lambda: descriptors_of(daemon.process.pid) <= before + 8)
    assert ann.says(STANDARD, READS, file["path"]) == SECRET


def descriptors_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


LEAVES = """
kv = sym.kv_create("ann/left.kv")
sym.kv_write(kv, [201] * 3000)
raw = open(sym.model_info().mount + "/ann/left.kv", "rb").read()
print(json.dumps([raw[at:at + 16].hex() for at in range(1 << 16, len(raw) - 16, 65521)]))
kv.close()
sym.kv_remove("ann/left.kv")
"""
LOOKS = """
import hashlib
marks = {bytes.fromhex(each) for each in json.loads(sys.argv[1])} - {bytes(16)}
free = sym.daemon_stat()["num_free_pages"]
sym.kv_mkdir("bob", 0o700, parents=True)
found, looked_at = [], 0
for number in range(12):
    path = f"bob/new-{number}.kv"
    with sym.kv_create(path) as kv:
        sym.kv_write(kv, [3 + number] * 31)
        raw = open(f"{sym.model_info().mount}/{path}", "rb").read()
    looked_at += len(raw)
    found += [mark.hex() for mark in marks if mark in raw]
    sym.kv_remove(path)
print(json.dumps({"found": found, "looked at": looked_at, "marks": len(marks)}))
"""


def test_pages_that_another_user_left_hold_nothing_of_it(ann, bob, file):
    marks = ann.says(STANDARD, LEAVES)
    found = bob.says(STANDARD, LOOKS, json.dumps(marks))
    assert found["marks"] > 10
    assert found["looked at"] > 1 << 16
    assert found["found"] == []


COMPUTES = """
mount, before = sym.model_info().mount, sym.daemon_stat()["num_free_pages"]
sym.kv_mkdir("bob", 0o700, parents=True)
def file_of(tokens, name):
    began = time.perf_counter()
    kv = sym.kv_create(f"bob/{name}.kv")
    sym.kv_write(kv, tokens)
    return kv, time.perf_counter() - began
def looks(tokens, name):
    kv, _ = file_of(tokens, name)
    raw = open(f"{mount}/bob/{name}.kv", "rb").read()
    open(f"{mount}/bob/{name}-again.kv", "wb").write(raw)
    row = sym.kv_du(f"bob/{name}.kv")["rows"][0]
    shared = os.getxattr(f"{mount}/bob/{name}.kv", "user.kv.shared").decode()
    told = [row["pages"], row["exclusive_pages"], row["shared_pages"], shared]
    kv.close()
    for each in (name, name + "-again"):
        sym.kv_remove(f"bob/{each}.kv")
    return told
known, unknown = json.loads(sys.argv[1]), [each + 1 for each in json.loads(sys.argv[1])]
told = [looks(known, "known"), looks(unknown, "unknown")]
times = [[], []]
for turn in range(60):
    for which in ((0, 1) if turn % 2 else (1, 0)):
        kv, taken = file_of((known, unknown)[which], f"timed-{turn}-{which}")
        times[which].append(taken)
        kv.close()
        sym.kv_remove(f"bob/timed-{turn}-{which}.kv")
print(json.dumps({"told": told, "fastest": [min(each) for each in times]}))
"""


def test_what_another_user_has_computed_is_told_by_no_count_and_no_time(bob, file):
    found = bob.says(STANDARD, COMPUTES, json.dumps(SECRET))
    known, unknown = found["told"]
    assert known == unknown
    fast, slow = sorted(found["fastest"])
    assert slow < 2 * fast, found["fastest"]


MEETS = """
import socket, stat
mount = sym.model_info().mount
made = {}
def tried(name, make):
    try:
        made[name] = repr(make())
    except OSError as error:
        made[name] = None
def binds():
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{mount}/ann/meeting.sock")
        return "bound"
tried("socket", binds)
tried("FIFO", lambda: os.mkfifo(f"{mount}/ann/meeting.fifo"))
tried("device", lambda: os.mknod(f"{mount}/ann/meeting.dev", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
tried("set-uid", lambda: (open(f"{mount}/ann/suid", "w").close(), os.chmod(f"{mount}/ann/suid", 0o4755)))
print(json.dumps(made))
"""


def test_the_mount_has_no_sockets_no_devices_and_nothing_that_runs_as_its_owner(ann, file):
    made = ann.says(STANDARD, MEETS)
    assert made["device"] is None
    assert made["set-uid"] is None
    assert made["socket"] is None, "programs meet by a socket in the mount, and pass each other descriptors"


PASSES = """
import array, socket
from libsym.channel.handshake import GREETING
held = []
for turn in range(20):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["SYMPHONY_SOCKET"])
    connection.setblocking(False)
    try:
        for each in range(40):
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
            rights = array.array("i", fds)
            try:
                said = [GREETING[each % len(GREETING):][:1]]
                connection.sendmsg(said, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            finally:
                for fd in fds: os.close(fd)
    except OSError:
        pass
    held.append(connection)
print(json.dumps(len(held)), flush=True)
signal.pause()
"""


def test_descriptors_that_a_program_sends_pile_up_nowhere(house, bob):
    launcher = int((bob.launcher / "lock").read_text())
    before = descriptors_of(house.daemon.process.pid), descriptors_of(launcher)
    bob.run(STANDARD, "-d", "--name", "passer", bob.script(PASSES))
    eventually(lambda: bob.symphony("logs", "passer").stdout)
    daemon, launching = descriptors_of(house.daemon.process.pid), descriptors_of(launcher)
    assert daemon <= before[0] + 120, "one for each connection, and what a connection takes"
    assert launching <= before[1] + 60
    bob.symphony("kill", "-s", "KILL", "passer")
    eventually(lambda: descriptors_of(house.daemon.process.pid) <= before[0] + 8)
