"""Another user's KV is out of a sandboxed program's reach: by calls, by the mount, and by numbers."""

import json
import os

import pytest

from tests.symphony.escapes.house import PROGRAMS, STANDARD
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

CALLS = PROGRAMS / "kv_calls.py"
SECRET = [7, 77, 177, 27, 127, 227, 97, 197] * 12
"""Three pages of tokens."""
OWNER = """
path, tokens = sys.argv[1], json.loads(sys.argv[2])
sym.kv_mkdir(os.path.dirname(path), 0o755, parents=True)
kv = sym.kv_create(path)
sym.kv_write(kv, tokens)
print(json.dumps({"tokens": kv.read()[0], "id": os.environ["SYMPHONY_PROGRAM"]}), flush=True)
if len(sys.argv) == 3: signal.pause()
"""
READS = "print(json.dumps(sym.kv_read(sys.argv[1])[0]))"


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


def test_each_call_does_something_for_the_owner_and_nothing_for_another_user(ann, bob, file):
    ann.run(STANDARD, ann.script(OWNER), "ann/mine.kv", json.dumps(SECRET), "ends")
    owner, other = outcomes(ann, "calls", "ann/mine.kv"), outcomes(bob, "calls", file["path"])
    assert {name: row for name, row in other.items() if row.get("got", "None") != "None"} == {}
    assert {name: row for name, row in owner.items() if "refused" in row} == {}


def test_numbers_of_handles_and_programs_of_others_lead_nowhere(bob, file):
    found = outcomes(bob, "handles", file["path"]) | outcomes(bob, "programs", file["id"])
    assert {name: row for name, row in found.items() if row.get("got", "[]") != "[]"} == {}


MEETS = """
import socket
with socket.socket(socket.AF_UNIX) as listening:
    try: print(json.dumps(listening.bind(f"{sym.model_info().mount}/ann/meeting.sock")))
    except OSError as error: print(json.dumps(error.strerror))
"""


def test_no_programs_meet_by_a_socket_in_the_mount_where_they_could_pass_descriptors(ann, file):
    assert ann.says(STANDARD, MEETS) == "Permission denied"
