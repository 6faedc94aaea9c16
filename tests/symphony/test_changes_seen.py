"""kv_changes() on a real daemon: what two users are told while programs fork, grow and close files."""

import os
import threading

import pytest

import libsym as sym
from tests.symphony.services import as_user

ANN, BOB = 4241, 4242
READER = """
import json
found = sym.kv_changes()
print(json.dumps(sorted([each.path, each.readable, each.tokens] for each in found.files if each.path)), flush=True)
print(sum(each.path is None for each in found.files), flush=True)
"""


@pytest.mark.usefixtures("shared")
def test_a_program_that_waits_hears_of_a_fork_while_it_lives_and_when_it_is_closed():
    base = sym.kv_create()
    sym.kv_write(base, [7] * 40)
    found = sym.kv_changes()
    assert found.whole
    heard = []

    def listen():
        now = found
        while not any(each.gone for each in now.files):
            now = sym.kv_changes(now.since, timeout=10)
            assert not now.whole
            heard.extend(now.files)

    thread = threading.Thread(target=listen)
    thread.start()
    with sym.kv_fork(base) as fork:
        number = sym.kv_stat(fork).ino
        for _ in range(3):
            sym.pred(fork, [7])
    thread.join(60)
    of_fork = [each for each in heard if each.ino == number]
    assert of_fork[-1].gone
    assert {each.origin for each in of_fork} == {sym.kv_stat(base).ino}
    assert {each.shared for each in of_fork} == {40}
    assert {each.program for each in of_fork} == {next(each.id for each in sym.programs() if each.pid == os.getpid())}
    assert of_fork[-1].tokens == 43


SETS_UP = """
sym.kv_mkdir("open", 0o755)
sym.kv_mkdir("closed", 0o700)
files = [sym.kv_create(path, mode=mode) for path, mode in (("open/a", 0o644), ("open/b", 0o600), ("closed/c", 0o644))]
for file in files:
    sym.kv_write(file, [7] * 3)
fork = sym.kv_fork(files[0])
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, to be several users")
@pytest.mark.usefixtures("open_to_all")
def test_another_user_is_told_what_it_could_list(start_daemon):
    daemon = start_daemon("--model", "tiny", "--open")
    owner = daemon.program(as_user(ANN, SETS_UP))
    assert owner.stdout.readline() == "\n"
    rows, num_forks = daemon.run(as_user(BOB, READER)).splitlines()
    assert (rows, num_forks) == ('[["open/a", true, 3], ["open/b", false, 3]]', "0")
    rows, num_forks = daemon.run(as_user(ANN, READER)).splitlines()
    assert (rows.count("true"), num_forks) == (3, "1")
    owner.communicate(timeout=60)
