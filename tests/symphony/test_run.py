"""`symphony run`: a program that a launcher starts is, to its user, as one that python starts."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.symphony.launchers import SYMPHONY, eventually, has_gone

AS_PYTHON = {
    "an error while another was handled": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('k')",
    "no syntax": "x = = 3",
    "sys.exit with a text": "sys.exit('a text')",
    "sys.exit with a number": "sys.exit(300)",
    "sys.exit without": "print('out', end=''); sys.exit()",
    "threads and exit functions": """
        import atexit, threading
        atexit.register(print, 'bye')
        threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()
        sys.exit(5)
    """,
    "an interrupt": "import atexit; atexit.register(print, 'bye')\nraise KeyboardInterrupt",
    "a hook that fails": "sys.excepthook = lambda *what: (print('hook'), 1 / 0)\nraise ValueError('x')",
    "a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "files and finalizers at the end": """
        import collections, logging, tempfile
        class Last:
            def __init__(self, word): self.word = word
            def __del__(self): print(self.word, flush=True)
        last, collections.mine = Last("of main"), collections.OrderedDict
        loop = Last("of a cycle"); loop.loop = loop
        open("written", "w").write("before") ; kept = open("written", "w"); kept.write("x" * 100)
        held = tempfile.TemporaryDirectory()
        logging.warning("a line")
        print(os.path.exists(held.name))
    """,
    "who it is": """
        print(sys.argv, __name__, __file__, sys.path, sorted(globals()), sys.stdout.isatty(), sys.stdin.seekable())
        print(os.getcwd(), sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through)
        print(sys.flags.dont_write_bytecode, sys.dont_write_bytecode, sys.pycache_prefix, __spec__, __package__)
        import inspect, pickle
        class Thing: pass
        print(pickle.loads(pickle.dumps(Thing())).__class__, inspect.getsource(Thing))
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("source", AS_PYTHON.values(), ids=AS_PYTHON.keys())
def test_a_program_does_what_it_does_when_python_starts_it(launchers, source):
    launchers.script(source)
    words = ["prog.py", "an argument", "-x"]
    how = {"cwd": launchers.directory, "env": launchers.environment, "stdin": subprocess.PIPE, "text": True}
    by_python = subprocess.run([sys.executable, "-u", *words], check=False, capture_output=True, **how)
    run = launchers.client("run", "--isolation", "none", *words)
    out, err = run.communicate(timeout=60)
    status = by_python.returncode if by_python.returncode >= 0 else 128 - by_python.returncode
    assert (out, err, run.returncode) == (by_python.stdout, by_python.stderr, status)


@pytest.mark.slow
def test_a_program_has_the_environment_umask_and_limits_of_its_user(launchers):
    program = launchers.script("""
        import resource
        print(os.environ["MINE"], os.environ["MORE"], "LEFT" in os.environ, oct(os.umask(0)))
        print(resource.getrlimit(resource.RLIMIT_NOFILE), time.tzname[0], os.environ["SYMPHONY_PROGRAM"])
    """)
    launchers.symphony("ps", check=False)
    launchers.environment |= {"MINE": "yes", "TZ": "XYZ-3"}
    command = f"umask 027; ulimit -n 333; {' '.join(SYMPHONY)} run --isolation none -e MORE=a=b {program}"
    out = subprocess.check_output(command, shell=True, env=launchers.environment, text=True)
    assert out.startswith("yes a=b False 0o27\n(333, 333) XYZ ")


@pytest.mark.slow
@pytest.mark.parametrize("variable", [{"PYTHONHASHSEED": "0"}, {"LC_ALL": "en_US.ISO-8859-1"}])
def test_what_only_an_interpreters_start_can_heed_is_heeded(launchers, variable):
    program = launchers.script("print(sys.flags.hash_randomization, hash('a'), sys.stdout.encoding)")
    launchers.environment |= variable
    by_python = subprocess.run([sys.executable, program], check=True, env=launchers.environment, capture_output=True)
    assert launchers.symphony("run", program).stdout.split()[::2] == by_python.stdout.decode().split()[::2]


def test_a_program_has_no_descriptor_but_its_own(launchers):
    program = launchers.script("print(sorted(map(int, os.listdir('/proc/self/fd'))), os.getsid(0) == os.getpid())")
    assert launchers.symphony("run", program).stdout == "[0, 1, 2, 3] True\n", "3 is that of listdir"


def test_megabytes_go_through_both_ways(launchers):
    program = launchers.script("import shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    content = os.urandom(3 << 20)
    assert launchers.symphony("run", program, text=False, input=content).stdout == content


def test_output_and_error_keep_their_order_where_both_go_to_one_place(launchers):
    program = launchers.script("for i in range(200): os.write(1 + i % 2, b'%d\\n' % i)")
    run = launchers.client("run", program, stderr=subprocess.STDOUT)
    assert run.communicate(timeout=20)[0] == "".join(f"{i}\n" for i in range(200))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        ("nothing.py", 127, "no program nothing.py: there is no such file"),
        ("nothing", 127, "Symphony ships ask, async_tools, batch, beam"),
        ("/etc", 126, "/etc: is a directory"),
        ("./data", 126, "./data: Permission denied"),
        ("./interpreter", 127, "./interpreter: No such file or directory"),
        ("a" * 300, 126, "File name too long"),
        ("", 127, "it is no file here"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(launchers, word, status, said):
    (launchers.directory / "data").write_text("no program")
    (launchers.directory / "interpreter").write_text("#!/no/such/thing\n")
    (launchers.directory / "interpreter").chmod(0o755)
    done = launchers.symphony("run", word, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (status, "", 1)
    assert said in done.stderr
    assert word not in [each["name"] for each in launchers.ps("--all")]


def test_what_is_no_python_is_executed(launchers):
    script = launchers.directory / "script"
    script.write_text('#!/bin/sh\necho "$1" $SYMPHONY_PROGRAM | wc -w; exit 3\n')
    script.chmod(0o755)
    done = launchers.symphony("run", "./script", "a b", check=False)
    assert (done.stdout.strip(), done.returncode) == ("3", 3)


@pytest.mark.slow
def test_shipped_programs_are_listed_and_found_by_their_names(launchers):
    listed = launchers.symphony("run", "--list").stdout
    assert launchers.symphony("run").stdout == listed
    assert re.match(r"Basics\n  completion +Completes a text", listed)
    assert len(listed.splitlines()) > 30
    assert max(map(len, listed.splitlines())) <= 124, "a line each"
    (launchers.directory / "ask").mkdir()
    assert "usage: symphony run ask" in launchers.symphony("run", "ask", "--help").stdout


@pytest.mark.slow
def test_options_behind_the_program_are_its_own(launchers):
    program = launchers.script("print(sys.argv[1:])")
    assert launchers.symphony("run", program, "--detach", "--", "-x").stdout == "['--detach', '--', '-x']\n"
    assert launchers.symphony("run", "--", program, "-d").stdout == "['-d']\n"


def test_without_a_daemon_it_says_so_and_starts_no_launcher(own_launchers):
    launchers = own_launchers
    launchers.daemon.stop()
    done = launchers.symphony("run", launchers.script(""), check=False)
    assert done.returncode == 125
    assert f"no daemon listens at {launchers.socket}: start it with `symphony serve`" in done.stderr
    assert not (launchers.runtime / "symphony").exists()
    launchers.daemon.start()
    launchers.symphony("run", "prog.py")
    launchers.daemon.stop()
    again = launchers.symphony("run", "prog.py", check=False)
    assert (again.returncode, again.stderr) == (125, done.stderr), "a launcher that lives says the same"
    launchers.daemon.start()


def test_the_daemon_hears_of_start_pid_and_end_and_may_refuse(own_launchers):
    launchers = own_launchers
    program = launchers.script("open('ran', 'w'); sys.exit(4)")
    launchers.daemon.refusals["start"] = "uid 7 has too many programs"
    done = launchers.symphony("run", "--isolation", "none", program, check=False)
    assert (done.returncode, done.stderr) == (125, "symphony: uid 7 has too many programs\n")
    assert not (launchers.directory / "ran").exists()
    assert launchers.ps("--all") == []
    launchers.daemon.refusals.clear()
    launchers.daemon.told.clear()
    launchers.symphony("run", "--isolation", "none", "--tokens", "5", program, check=False)
    start = launchers.daemon.wait_for("start", name="prog")
    assert (start["limits"], start["parent"], start["again"], len(start["id"])) == ({"tokens": 5}, None, False, 8)
    end = launchers.daemon.wait_for("end", id=start["id"])
    assert (end["status"], end["reason"]) == (4, "exit")
    assert launchers.program("prog")["pid"] == launchers.daemon.wait_for("pid", id=start["id"])["pid"]


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGTERM, 9, "told\n"), (signal.SIGINT, 130, "KeyboardInterrupt\n")]
)
def test_a_signal_to_the_client_is_one_to_the_program(launchers, number, status, said):
    program = launchers.script("""
        signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(9)))
        print("ready")
        signal.pause()
    """)
    run = launchers.client("run", program, stderr=subprocess.STDOUT)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    assert run.stdout.read().endswith(said)
    assert run.wait(20) == status


def test_a_client_that_dies_hangs_its_program_up(own_launchers):
    launchers = own_launchers
    run = launchers.client("run", "--isolation", "none", launchers.script("print(os.getpid())\ntime.sleep(60)"))
    pid = int(run.stdout.readline())
    run.kill()
    assert has_gone(pid)
    assert launchers.symphony("wait", "prog", check=False).stdout == "129\n"


def test_a_client_under_nohup_stays_with_its_program(launchers):
    program = launchers.script("print('ready')\nsys.stdin.read()\nprint('done')")
    run = launchers.client("run", program, nohup=True)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGHUP)
    run.stdin.close()
    assert run.stdout.read() == "done\n"
    assert run.wait(20) == 0


def test_a_client_whose_reader_goes_ends_quietly(own_launchers):
    launchers = own_launchers
    run = launchers.client("run", launchers.script("for i in range(10**6): print(i)"))
    assert run.stdout.readline() == "0\n"
    run.stdout.close()
    assert run.wait(20) == 128 + signal.SIGPIPE
    assert run.stderr.read() == ""
    assert launchers.symphony("wait", "prog", check=False).stdout == "129\n"


def test_a_client_that_does_not_read_holds_the_program_up_and_loses_nothing(own_launchers):
    launchers = own_launchers
    program = launchers.script("""
        for i in range(20):
            os.write(1, (b"%d" % i).ljust(999_999) + b"\\n")
            open("done", "w").write(str(i))
    """)
    run = launchers.client("run", "--isolation", "none", program)
    assert run.stdout.readline().split() == ["0"]
    done = launchers.directory / "done"
    assert int(eventually(lambda: done.exists() and done.read_text())) < 15  # it may be being written
    log = sum(path.stat().st_size for path in launchers.state.glob("programs/*/log*"))
    assert log < 3 << 20
    rest = run.stdout.read()  # not communicate(), which would pass over what was read ahead
    assert run.wait(20) == 0
    assert rest.split() == [str(i) for i in range(1, 20)]
    assert len(rest) == 19 * 1_000_000
