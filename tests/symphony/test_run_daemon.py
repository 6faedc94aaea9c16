"""Programs that a launcher started, on a real daemon: their system calls, their limits, their children."""

import json
import os
import subprocess
import sys

import pytest

from tests.symphony.launchers import eventually

HEAD = "import os, sys, time\nimport libsym as sym\n"


@pytest.fixture
def script(tmp_path):
    """A program given as text."""

    def write(source: str, name: str = "prog.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + source)
        return str(path)

    return write


def test_a_program_calls_the_model_as_itself(daemon, script):
    source = """
kv = sym.kv_create()
print(sym.getpid() == os.getpid(), sym.pred(kv, [1, 2]).argmax() >= 0, sym.getrusage().tokens)
if os.fork() == 0:
    print(sym.getpid() == os.getpid(), sym.pred(sym.kv_create(), [3]).argmax() >= 0)
    sys.exit()
os.wait()
print(sym.getrusage().tokens)
"""
    assert daemon.symphony("run", "--isolation", "none", script(source)).stdout.split() == [
        "True",
        "True",
        "2",
        "True",
        "True",
        "3",
    ]


def test_a_program_that_asks_for_too_many_tokens_is_ended(daemon, script):
    source = """
kv = sym.kv_create()
while True:
    try:
        sym.pred(kv, [1] * 10)
    except sym.OverQuota:
        time.sleep(60)
"""
    done = daemon.symphony("run", "--tokens", "25", script(source), check=False)
    assert done.returncode == 121
    assert done.stderr == "symphony: prog asked for more tokens than its limit of 25, and was ended\n"


def test_a_program_says_what_its_limit_made_of_it_before_it_is_ended(daemon, script):
    source = "kv = sym.kv_create()\nwhile True: sym.pred(kv, [1] * 10)"
    done = daemon.symphony("run", "--tokens", "25", script(source), check=False)
    assert done.returncode == 121
    *traceback, error, said = done.stderr.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert "over its limit on tokens: it has computed 20 of its 25 tokens" in error
    assert said == "symphony: prog asked for more tokens than its limit of 25, and was ended"


def test_a_program_that_holds_too_many_pages_is_ended(daemon, script):
    source = "kv = sym.kv_create()\ntry: sym.kv_write(kv, [1] * 500)\nexcept sym.OverQuota: time.sleep(60)"
    assert daemon.symphony("run", "--pages", "3", script(source), check=False).returncode == 122


def test_a_program_starts_another_waits_for_it_and_ends_a_third(daemon, script):
    child = script("print(sym.getpid() > 0, sys.argv[1:]); sys.exit(4)", "child.py")
    sleeper = script("time.sleep(600)", "sleeper.py")
    source = """
child = sym.spawn(sys.argv[1], ["a"], name="the-child")
print(sym.wait(child))
other = sym.spawn(sys.argv[2])
sym.kill(other)
print(sym.wait(other.id))
sym.spawn(sys.argv[2], name="left")
"""
    out = daemon.symphony("run", script(source), child, sleeper).stdout
    assert out == "Ended(status=4, reason='exit')\nEnded(status=143, reason='killed')\n"
    assert daemon.symphony("logs", "the-child").stdout == "True ['a']\n"
    assert eventually(lambda: not [each for each in listed(daemon) if each["program"]] or None)


def test_ps_tells_what_programs_have_used_and_wait_for_and_who_else_is_there(daemon, script):
    daemon.symphony("run", "-d", script("sym.pred(sym.kv_create(), [1, 2]); print('has'); time.sleep(600)"))
    alone = subprocess.Popen([sys.executable, script("sym.recv('never')", "alone.py")], env=daemon.environment)
    try:
        eventually(lambda: daemon.symphony("logs", "prog").stdout)
        eventually(lambda: "waiting for a message" in [each["state"] for each in listed(daemon)])
        rows = {each["pid"]: each for each in listed(daemon)}
        [launched] = [each for each in rows.values() if each["name"] == "prog"]
        assert (launched["state"], launched["connections"], launched["usage"]["tokens"]) == ("idle", 1, 2)
        assert (rows[alone.pid]["call"], rows[alone.pid]["program"]) == ("recv", None)
        table = daemon.symphony("ps").stdout
        assert f"{alone.pid} root" in table
        assert "waiting for a message (recv) (not of this launcher)" in table
    finally:
        alone.kill()
        alone.wait()
        daemon.symphony("kill", "prog")


def listed(daemon) -> list[dict]:
    return json.loads(daemon.symphony("ps", "--json").stdout)


def test_what_a_killed_program_had_is_free_at_once(daemon, script):
    before = daemon.stat()["num_free_pages"]
    source = "kv = sym.kv_create(); sym.kv_write(kv, [1] * 2000); print('has', flush=True); time.sleep(600)"
    daemon.symphony("run", "-d", script(source))
    eventually(lambda: daemon.symphony("logs", "prog").stdout)
    assert daemon.stat()["num_free_pages"] < before
    daemon.symphony("kill", "-s", "9", "prog")
    daemon.symphony("wait", "prog", check=False)
    eventually(lambda: daemon.stat()["num_free_pages"] == before, within_s=1)


def test_a_program_goes_on_from_its_synced_file_when_its_daemon_was_killed(start_daemon, script, tmp_path):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "16M")
    source = """
try:
    kv = sym.kv_open("work.kv", "rw")
except sym.NotFound:
    kv = sym.kv_create("work.kv")
print("begins with", kv.len(), flush=True)
while kv.len() < 40:
    sym.kv_write(kv, [1] * 10)
    sym.kv_sync(kv)
    if kv.len() == 20:
        open(sys.argv[1]).read()
print("done", kv.len())
"""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    daemon.symphony("run", "-d", "--restart", "on-failure", script(source), fifo)
    eventually(lambda: "begins" in daemon.symphony("logs", "prog").stdout)
    writer = os.open(fifo, os.O_WRONLY)  # the program waits at 20
    daemon.stop(9)
    os.close(writer)
    again = start_daemon("--model", "tiny", "--kv-memory", "16M")
    assert again.symphony("wait", "prog").stdout == "0\n"
    assert again.symphony("logs", "prog").stdout == "begins with 0\nbegins with 20\ndone 40\n"


def test_a_child_has_no_limit_above_its_parents(daemon, script):
    child = script("sym.kv_write(sym.kv_create(), range(40))", "child.py")
    source = "print(sym.wait(sym.spawn(sys.argv[1], limits={'tokens': 1000})))"
    run = daemon.symphony("run", "--tokens", "20", script(source), child)
    assert run.stdout == "Ended(status=121, reason='tokens')\n"


@pytest.mark.parametrize("isolation", ["none", "standard"])
def test_a_child_by_a_path_longer_than_a_message_is_refused_and_the_next_one_starts(daemon, script, isolation):
    """The answer did not fit its message: spawn() waited for ever."""
    source = """
long = "/" + "\\U0001f600" * 15_000
for words in ({"program": "/bin/true", "cwd": long}, {"program": long}):
    try:
        sym.spawn(**words)
    except sym.SymError as error:
        print(long[:4000] in str(error), len(str(error)) < 5000)
print(sym.wait(sym.spawn("/bin/true")).status)
"""
    done = daemon.symphony("run", "--isolation", isolation, script(source))
    assert done.stdout.splitlines() == ["True True", "True True", "0"]
