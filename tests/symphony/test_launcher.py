"""Programs that outlive their command: ps, kill, logs, wait, attach; limits, restarts, children; and failures."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from symphony import __version__
from symphony.launcher.common import wire
from tests.symphony.launchers import end_process, eventually, has_gone

pytestmark = pytest.mark.slow

SLEEP = "print('ready', flush=True)\ntime.sleep(600)"


def detached(launchers, source, *options, name="prog.py") -> str:
    return launchers.symphony("run", "-d", *options, launchers.script(source, name)).stdout.strip()


def run_two(launchers):
    """A command that runs a program of two processes, and their pids."""
    program = launchers.script("os.write(1, b'%d\\n' % (os.fork() or os.getpid()))\ntime.sleep(600)")
    run = launchers.client("run", "--isolation", "none", program)
    return run, [int(run.stdout.readline()) for _ in range(2)]


def ended(launchers, name) -> tuple[int, str]:
    """Status and reason of a program, when it has ended."""
    launchers.symphony("wait", name, check=False)
    program = launchers.program(name)
    return program["status"], program["reason"]


def test_a_detached_program_is_named_listed_signalled_and_waited_for(own_launchers):
    launchers = own_launchers
    assert detached(launchers, SLEEP) == "prog"
    assert detached(launchers, SLEEP) == "prog-2"
    assert detached(launchers, SLEEP, "--name", "mine") == "mine"
    (launchers.directory / "pack").mkdir()
    assert detached(launchers, SLEEP, name="pack/__main__.py") == "pack"
    assert [each["name"] for each in launchers.ps()] == ["prog", "prog-2", "mine", "pack"]
    assert {each["isolation"] for each in launchers.ps()} == {"standard"}
    done = launchers.symphony("ps", check=False)
    assert done.returncode == 1
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["NAME", "prog", "prog-2", "mine", "pack"]
    assert "what the daemon knows of programs is missing" in done.stderr
    launchers.symphony("kill", "prog-2", launchers.program("mine")["id"])
    assert (ended(launchers, "prog-2"), ended(launchers, "mine")) == ((143, "killed"), (143, "killed"))
    launchers.symphony("kill", "-s", "KILL", launchers.program("prog")["pid"], "pack")
    done = launchers.symphony("wait", "prog", "mine", check=False)
    assert (done.stdout, done.returncode) == ("prog 137\nmine 143\n", 143)
    launchers.symphony("wait", "pack", check=False)
    assert launchers.ps() == []
    assert {each["name"] for each in launchers.ps("--all")} == {"prog-2", "mine", "prog", "pack"}
    assert launchers.symphony("kill", "prog", check=False).stderr == "symphony: prog has ended already\n"
    assert "no program nobody" in launchers.symphony("logs", "nobody", check=False).stderr


def test_logs_keep_both_streams_and_follow_to_the_end(launchers):
    fifo = launchers.directory / "fifo"
    os.mkfifo(fifo)
    detached(launchers, "print('out'); print('err', file=sys.stderr); open('fifo').read(); print('last')")
    done = eventually(lambda: (found := launchers.symphony("logs", "prog")).stderr and found)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    follow = launchers.client("logs", "-f", "prog")
    assert follow.stdout.readline() == "out\n"
    fifo.write_text("")
    assert follow.communicate(timeout=20) == ("last\n", "err\n")
    assert follow.returncode == 0


def test_of_a_long_log_the_end_is_kept(own_launchers):
    launchers = own_launchers
    detached(launchers, "for i in range(10): os.write(1, (b'%d' % i).ljust(999_999) + b'\\n')")
    assert ended(launchers, "prog") == (0, "exit")
    words = launchers.symphony("logs", "prog").stdout.split()
    assert words[-1] == "9"
    assert 1 << 20 <= sum(path.stat().st_size for path in launchers.state.glob("programs/*/log*")) < 3 << 20


def test_a_client_comes_and_goes(launchers):
    run = launchers.client("run", launchers.script("for line in sys.stdin: print(line.upper(), end='')"))
    run.stdin.write("one\n")
    run.stdin.flush()
    assert run.stdout.readline() == "ONE\n"
    attached = launchers.client("attach", "prog")
    attached.stdin.write("two\n")
    attached.stdin.flush()
    assert (attached.stdout.readline(), run.stdout.readline()) == ("TWO\n", "TWO\n")
    attached.kill()
    run.stdin.write("three\n")
    run.stdin.flush()
    assert run.stdout.readline() == "THREE\n"
    run.stdin.close()
    assert run.wait(20) == 0
    assert launchers.symphony("attach", "prog", check=False).returncode == 1
    assert launchers.symphony("logs", "prog").stdout == "ONE\nTWO\nTHREE\n"


LIMITS = {
    "time": (
        "--time=300ms",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
        124,
        "ran for more seconds than its limit of 0.3,",
    ),
    "memory at once": ("--memory=100M", "bytearray(1 << 30)", 120, "\nMemoryError\n"),
    "memory of children": (
        "--memory=100M",
        "for _ in range(4): os.fork() or (b'x' * (60 << 20), time.sleep(60))\ntime.sleep(60)",
        120,
        "used more bytes of memory than its limit of 104,857,600, and was ended",
    ),
    "processes": ("--processes=3", "for _ in range(4): os.fork() or time.sleep(60)\ntime.sleep(60)", 123, "of 3"),
}


@pytest.mark.parametrize(("option", "source", "status", "said"), LIMITS.values(), ids=LIMITS.keys())
def test_a_limit_ends_a_program_with_a_line_and_its_own_status(launchers, option, source, status, said):
    done = launchers.symphony("run", option, launchers.script(source), check=False)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stderr.splitlines()[-1].startswith("symphony: prog ")
    launchers.daemon.wait_for("end", status=status)
    assert launchers.symphony("logs", "prog").stderr == done.stderr


def test_memory_that_processes_share_counts_once(launchers):
    program = launchers.script("""
        kept = b"x" * (60 << 20)
        for _ in range(4):
            os.fork() or (time.sleep(0.5), os._exit(0))
        for _ in range(4):
            os.wait()
        print("done")
    """)
    assert launchers.symphony("run", "--memory", "150M", program).stdout == "done\n"


@pytest.mark.parametrize(("what", "status"), [("tokens", 121), ("page_seconds", 122)])
def test_a_limit_that_the_daemon_counts_ends_a_program(launchers, what, status):
    detached(launchers, SLEEP, "--tokens", "7", "--pages", "8")
    start = launchers.daemon.wait_for("start")
    assert start["limits"] == {"tokens": 7, "pages": 8}
    launchers.daemon.ask("limit", answered=False, id=start["id"], what=what)
    assert ended(launchers, "prog")[0] == status
    launchers.daemon.wait_for("end", status=status)


def test_a_program_that_fails_is_started_again_so_often_until_it_succeeds_or_somebody_ends_it(launchers):
    fails = launchers.script("print(repr(sys.stdin.read()), os.getpid()); sys.exit(3)")
    words = ["run", "--isolation", "none", "--restart"]
    done = launchers.symphony(*words, "on-failure:2", fails, input="once", check=False)
    given, pids = done.stdout.split()[::2], done.stdout.split()[1::2]
    assert (given, len(set(pids)), done.returncode) == (["'once'", "''", "''"], 3, 3)
    launchers.daemon.wait_for("end")
    assert [each["do"] for each in launchers.daemon.told if each["do"] in ("start", "end")] == ["start", "end"]
    assert launchers.program("prog")["restarts"] == 2
    succeeds = launchers.script("open('runs', 'a').write('x'); sys.exit(len(open('runs').read()) < 2)")
    assert launchers.symphony(*words, "on-failure", succeeds).returncode == 0
    detached(launchers, SLEEP, "--restart", "on-failure", name="killed.py")
    launchers.symphony("kill", "killed")
    assert ended(launchers, "killed") == (143, "killed")
    assert launchers.program("killed")["restarts"] == 0


def test_a_program_that_lost_its_daemon_starts_again_when_there_is_one(own_launchers):
    launchers = own_launchers
    fifo = launchers.directory / "fifo"
    os.mkfifo(fifo)
    source = "open('fifo').read(); open('runs', 'a').write('x'); sys.exit(1)"
    detached(launchers, source, "--isolation", "none", "--restart", "on-failure:1")
    start = launchers.daemon.wait_for("start")
    launchers.daemon.stop()
    fifo.write_text("")
    eventually(lambda: launchers.program("prog")["pid"] is None)
    launchers.daemon.told.clear()
    launchers.daemon.start()
    assert launchers.daemon.wait_for("start", again=True)["id"] == start["id"]
    launchers.daemon.wait_for("pid")
    fifo.write_text("")
    assert ended(launchers, "prog") == (1, "exit")
    assert (launchers.directory / "runs").read_text() == "xx"


def test_a_program_lives_on_while_its_daemon_is_away(own_launchers):
    launchers = own_launchers
    run = launchers.client("run", launchers.script("print('ready')\nprint(sys.stdin.readline())"))
    assert run.stdout.readline() == "ready\n"
    pid = launchers.daemon.wait_for("pid")["pid"]
    launchers.daemon.stop()
    launchers.daemon.told.clear()
    launchers.daemon.start()
    again = launchers.daemon.wait_for("start")
    assert (again["again"], again["pid"]) == (True, pid)
    assert run.communicate("word\n", timeout=20)[0] == "word\n\n"


# Children.


def spawn(launchers, parent, program, **words) -> dict:
    words = {"args": [], "env": {}, "cwd": None, **words}
    return launchers.daemon.ask("spawn", by=parent, program=str(program), **words)


def test_a_program_spawns_waits_and_kills(launchers):
    detached(launchers, SLEEP, "-e", "OF=parent")
    parent = launchers.daemon.wait_for("start")["id"]
    launchers.script("print(sys.argv[1:], os.environ['OF'], os.environ['ITS'], os.getcwd()); sys.exit(5)", "child.py")
    child = spawn(launchers, parent, "child.py", args=["a", "b"], env={"ITS": "own"}, name="named")
    assert (child["ok"], child["name"]) == (True, "named")
    assert launchers.daemon.wait_for("start", id=child["id"])["parent"] == parent
    assert launchers.daemon.ask("wait", by=parent, id=child["id"])["status"] == 5
    assert launchers.symphony("logs", "named").stdout == f"['a', 'b'] parent own {launchers.directory}\n"
    other = spawn(launchers, parent, launchers.script(SLEEP, "other.py"))
    assert launchers.daemon.ask("kill", by=other["id"], id=parent, signal=15)["errno"] == 1
    assert launchers.daemon.ask("kill", by=parent, id=other["id"], signal=9)["ok"]
    ended = launchers.daemon.ask("wait", by=parent, id=other["id"])
    assert (ended["ok"], ended["status"], ended["reason"]) == (True, 137, "killed")
    assert launchers.daemon.ask("kill", by=parent, id=other["id"], signal=9)["errno"] == 3
    assert spawn(launchers, parent, "nothing.py")["errno"] == 2
    assert "no limit 'luck'" in spawn(launchers, parent, "child.py", limits={"luck": 1})["error"]


def test_children_end_with_their_parent_unless_they_are_detached(launchers):
    detached(launchers, SLEEP)
    parent = launchers.daemon.wait_for("start")["id"]
    stubborn = launchers.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP, "child.py")
    child = spawn(launchers, parent, stubborn)
    grandchild = spawn(launchers, child["id"], launchers.script(SLEEP, "grandchild.py"))
    free = spawn(launchers, parent, launchers.script(SLEEP, "free.py"), detached=True)
    launchers.symphony("kill", "-s", "KILL", "prog")
    assert has_gone(child["pid"])
    assert has_gone(grandchild["pid"])
    assert [each["name"] for each in launchers.ps()] == ["free"]
    launchers.symphony("kill", free["id"])


def test_a_stand_in_that_is_killed_ends_its_program_on_the_other_machine(own_launchers):
    launchers = own_launchers
    launchers.environment["XDG_STATE_HOME"] = str(launchers.directory)  # no Ray cluster
    detached(launchers, SLEEP)
    parent = launchers.daemon.wait_for("start")["id"]
    refused = spawn(launchers, parent, "react", on="west", name="refused")
    assert launchers.daemon.ask("wait", by=parent, id=refused["id"])["reason"] == "exit"
    launchers.daemon.keep_connections = True  # the stand-in waits for an answer
    child = spawn(launchers, parent, "child.py", on="west", source="print()", env={"KEY": "secret"})
    assert launchers.daemon.ask("kill", by=parent, id=child["id"], signal=9)["ok"]
    killer = launchers.daemon.wait_for("start", name="kill-child")
    assert launchers.daemon.ask("kill", id=killer["id"], signal=9)["ok"]
    words = {each["name"]: each["args"] for each in launchers.ps("--all")}
    ident = next(word for word in words["child"] if word.startswith("--id=")).removeprefix("--id=")
    assert words["kill-child"][-5:] == ["kill", "--signal", "KILL", "--", f"west:{ident}"]
    assert "secret" not in str(words)
    assert set(words) == {"prog", "refused", "child", "kill-child"}
    assert not [*launchers.state.glob("sent/*")]


def test_a_client_chooses_the_id_of_its_program_and_sends_variables_in_a_file(launchers):
    variables = launchers.directory / "variables"
    variables.write_text('[["KEY", "a\\nb"]]')
    options = ("--id", "0000000a", "--env-json", variables)
    detached(launchers, "print(os.environ['KEY'])", *options)
    launchers.symphony("wait", "0000000a")
    assert launchers.symphony("logs", "0000000a").stdout == "a\nb\n"
    again = launchers.symphony("run", *options, launchers.script(SLEEP), check=False)
    assert (again.returncode, again.stderr) == (125, "symphony: there is a program with the id 0000000a\n")
    wrong = launchers.symphony("run", "--id", "../prog", launchers.script(SLEEP), check=False)
    assert (wrong.returncode, wrong.stderr) == (125, "symphony: '../prog' is no id: 8 digits of 0-9 and a-f\n")


def test_what_a_program_leaves_behind_ends_with_it(launchers):
    program = launchers.script("""
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
            if os.fork() == 0:
                print(os.getpid(), flush=True)
            time.sleep(600)
        os.read(0, 1)
    """)
    run = launchers.client("run", "--isolation", "none", program)
    pids = [int(run.stdout.readline()) for _ in range(2)]
    run.stdin.write("x")
    run.stdin.close()
    assert run.wait(20) == 0
    assert all(map(has_gone, pids))


# What fails.


def test_a_launcher_that_is_killed_takes_its_programs_along_and_its_clients_say_so(own_launchers):
    launchers = own_launchers
    run, pids = run_two(launchers)
    first = launchers.program("prog")["pid"]
    end_process(launchers.pid)
    err = run.communicate(timeout=20)[1]
    assert (err, run.returncode) == ("symphony: the launcher went away, and the program with it\n", 125)
    assert all(map(has_gone, {first, *pids}))
    program = launchers.program("prog")
    assert (program["status"], program["reason"], program["isolation"]) == (137, "signal", "none")
    assert launchers.symphony("logs", "prog").stdout.split() == [str(pid) for pid in pids]


def test_launcher_and_zygote_killed_at_once_leave_no_process_for_the_next_one(own_launchers):
    launchers = own_launchers
    _, pids = run_two(launchers)
    zygote, launcher = launchers.zygote, launchers.pid
    os.kill(launcher, signal.SIGSTOP)
    end_process(zygote)
    end_process(launcher)
    launchers.symphony("ps", check=False)
    assert all(map(has_gone, pids))


def test_a_launcher_takes_its_programs_along_or_goes_when_nobody_needs_it_and_the_next_one_knows_what_was(
    own_launchers,
):
    launchers = own_launchers
    detached(launchers, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))\n" + SLEEP)
    eventually(lambda: "ready" in launchers.symphony("logs", "prog").stdout)
    end_process(launchers.pid, signal.SIGTERM)
    state = launchers.state
    assert not (state / "control").exists()
    ready, theirs = os.pipe()
    command = [sys.executable, "-m", "symphony.launcher", state, launchers.socket, str(theirs), "0.2"]
    with subprocess.Popen(command, env=launchers.environment, pass_fds=[theirs], stderr=subprocess.DEVNULL) as launcher:
        os.close(theirs)
        assert os.read(ready, 1) == b"+"
        os.close(ready)
        assert launcher.wait(20) == 0
    assert launchers.symphony("logs", "prog").stdout == "ready\n"
    assert launchers.program("prog")["status"] == 8


def test_a_connection_of_a_program_reaches_the_daemon_with_the_programs_own_identity(launchers):
    launchers.daemon.keep_connections = True
    program = launchers.script("""
        import socket
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ["SYMPHONY_SOCKET"])
            print(os.getpid(), flush=True)
            print(connection.recv(100))
    """)
    run = launchers.client("run", "--isolation", "none", program)
    pid = int(run.stdout.readline())
    passed = eventually(lambda: launchers.daemon.passed and launchers.daemon.passed[0])
    peer = passed.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    assert int.from_bytes(peer[:4], sys.byteorder) == pid
    passed.send(b"hello")
    assert run.communicate(timeout=20)[0] == "b'hello'\n"


def test_a_thousand_descriptors_are_no_limit(launchers):
    """A shell's usual soft limit would end at some two hundred programs."""
    launchers.symphony("run", launchers.script(""))
    soft = Path(f"/proc/{launchers.pid}/limits").read_text().split("Max open files")[1].split()
    assert soft[0] == soft[1]


def test_a_request_of_a_newer_command_is_refused_with_the_launcher_s_release(own_launchers):
    launchers = own_launchers
    detached(launchers, SLEEP)
    (control,) = launchers.runtime.glob("symphony/*/control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(control))
        assert wire.receive(connection) == (wire.JSON, {"event": "hello", "release": __version__})
        wire.send(connection, {"do": "sing"})
        told = wire.receive(connection)[1]["error"]
    assert told.startswith(f"the launcher, of release {__version__}, does not understand this request: ")
    assert [each["name"] for each in launchers.ps()] == ["prog"]
