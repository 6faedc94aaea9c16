"""Programs that a launcher started, on a real daemon: their system calls, their limits, their children."""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def script(tmp_path):
    """A program given as text."""

    def write(source: str, name: str = "prog.py") -> str:
        path = tmp_path / name
        path.write_text(f"import os, sys, time\nimport libsym as sym\n{textwrap.dedent(source)}")
        return str(path)

    return write


def listed(daemon) -> list[dict]:
    return json.loads(daemon.symphony("ps", "--json").stdout)


def test_a_program_calls_the_model_as_itself_and_so_does_its_child_by_fork(shared, script):
    program = script("""
        def look(tokens):
            sym.pred(sym.kv_create(), tokens)
            print(sym.getpid() == os.getpid(), sym.getrusage().tokens, flush=True)
        look([1, 2])
        if os.fork() == 0:
            look([3])
            sys.exit()
        os.wait()
    """)
    assert shared.symphony("run", "--isolation", "none", program).stdout == "True 2\nTrue 3\n"


def test_a_program_that_asks_for_too_many_tokens_says_so_and_is_ended_whatever_it_does_next(shared, script):
    program = script("""
        import atexit
        atexit.register(time.sleep, 60)
        kv = sym.kv_create()
        while True: sym.pred(kv, [1] * 10)
    """)
    done = shared.symphony("run", "--tokens", "25", program, check=False)
    assert done.returncode == 121
    *traceback, said = done.stderr.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert "over its limit on tokens: it has computed 20 of its 25 tokens" in traceback[-1]
    assert said == "symphony: prog asked for more tokens than its limit of 25, and was ended"


def test_a_program_that_holds_too_many_pages_is_ended(shared, script):
    source = "kv = sym.kv_create()\ntry: sym.kv_write(kv, [1] * 500)\nexcept sym.OverQuota: time.sleep(60)"
    assert shared.symphony("run", "--pages", "3", script(source), check=False).returncode == 122


def test_a_program_starts_another_within_its_limits_waits_for_it_and_ends_a_third(shared, script):
    child = script("sym.kv_write(sym.kv_create(), range(int(sys.argv[1]))); print(sys.argv); sys.exit(4)", "child.py")
    sleeper = script("time.sleep(600)", "sleeper.py")
    source = """
        print(sym.wait(sym.spawn(sys.argv[1], ["5"], name="the-child")))
        other = sym.spawn(sys.argv[2])
        sym.kill(other)
        print(sym.wait(other.id))
        print(sym.wait(sym.spawn(sys.argv[1], ["40"], limits={"tokens": 1000})))
        sym.spawn(sys.argv[2], name="left")
    """
    run = shared.symphony("run", "--tokens", "20", script(source), child, sleeper)
    assert run.stdout.splitlines() == [
        *("Ended(status=4, reason='exit')", "Ended(status=143, reason='killed')"),
        "Ended(status=121, reason='tokens')",
    ]
    assert shared.symphony("logs", "the-child").stdout == f"{[child, '5']}\n"
    eventually(lambda: not [each for each in listed(shared) if each["program"]])


def test_ps_tells_what_programs_have_used_and_wait_for_and_who_else_is_there(shared, script):
    source = "sym.pred(sym.kv_create(), [1, 2]); print('has'); time.sleep(600)"
    shared.symphony("run", "-d", script(source, "told.py"))
    alone = subprocess.Popen([sys.executable, script("sym.recv('never')", "alone.py")], env=shared.environment)
    try:
        eventually(lambda: shared.symphony("logs", "told").stdout)
        eventually(lambda: "waiting for a message" in [each["state"] for each in listed(shared)])
        rows = {each["pid"]: each for each in listed(shared)}
        [launched] = [each for each in rows.values() if each["name"] == "told"]
        assert (launched["state"], launched["connections"], launched["usage"]["tokens"]) == ("idle", 1, 2)
        assert (rows[alone.pid]["call"], rows[alone.pid]["program"]) == ("recv", None)
        table = shared.symphony("ps").stdout
        assert f"{alone.pid} root" in table
        assert "waiting for a message (recv) (not of this launcher)" in table
    finally:
        alone.kill()
        alone.wait()
        shared.symphony("kill", "told")


def test_a_child_by_a_path_longer_than_a_message_is_refused_and_the_next_one_starts(shared, script):
    """The answer did not fit its message: spawn() waited for ever."""
    source = """
        long = "/" + "\\U0001f600" * 15_000
        for words in ({"program": "/bin/true", "cwd": long}, {"program": long}):
            try: sym.spawn(**words)
            except sym.SymError as error: print(long[:4000] in str(error), len(str(error)) < 5000)
        print(sym.wait(sym.spawn("/bin/true")).status)
    """
    done = shared.symphony("run", script(source))
    assert done.stdout.splitlines() == ["True True", "True True", "0"]
