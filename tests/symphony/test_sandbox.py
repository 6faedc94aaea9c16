"""A sandbox's contents, and the user's additions. Its limits are tested by tests/symphony/escapes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from symphony.launcher.sandbox.probe import probe
from tests.symphony.launchers import SYMPHONY, end_process, eventually, has_gone

pytestmark = pytest.mark.skipif(probe() is not None, reason=f"NO SANDBOX TESTED: {probe()}")


@pytest.fixture
def launchers(shared_launchers):
    return shared_launchers


def lines(launchers, source: str, *options: object) -> list[str]:
    """Run a program in a sandbox, and return its output by lines."""
    return launchers.symphony("run", *options, launchers.script(source)).stdout.splitlines()


def test_a_program_sees_the_system_its_own_directory_and_nothing_else_of_the_machine(launchers):
    (launchers.directory / "beside.txt").write_text("beside")
    source = """
        print(open("beside.txt").read(), os.getcwd() == os.path.dirname(os.path.abspath(__file__)))
        print(sorted(os.listdir("/run")), sorted(os.listdir("/var")), os.path.exists("/sys"))
        print([each for each in ("/etc/shadow", "/home", "/root/.bashrc", "/var/log", "/boot") if os.path.exists(each)])
        print([name for name in os.listdir("/proc") if name.isdigit()])
        print(os.getuid(), os.getgid(), os.path.exists("/usr/bin/env"))
    """
    assert lines(launchers, source) == [
        "beside True",
        "['symphony.sock'] ['run', 'tmp'] False",
        "[]",
        "['1', '2']",
        f"{os.getuid()} {os.getgid()} True",
    ]


def test_only_its_own_directories_can_be_written_to_and_they_are_private_and_bounded(launchers):
    found = lines(
        launchers,
        """
        def tried(path):
            try:
                open(path, "w").close()
                return "written"
            except OSError as error:
                return error.strerror
        print([tried(path) for path in ("/x", "/usr/x", "/etc/x", "here", sys.prefix + "/x")])
        print([tried(path) for path in ("/tmp/x", "/var/tmp/x", "/dev/shm/x", "/dev/null")])
        try:
            with open("/tmp/much", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            print(error.strerror, os.path.getsize("/tmp/much") >> 20 <= 256)
        """,
    )
    assert found[:2] == [str(["Read-only file system"] * 5), str(["written"] * 4)]
    assert found[2] == "No space left on device True"
    assert not (launchers.directory / "here").exists()
    assert not Path("/tmp/much").exists()


def test_its_home_is_empty_and_its_own(launchers):
    home = launchers.outside / "home"
    home.mkdir()
    (home / "secret").write_text("s")
    launchers.environment["HOME"] = str(home)
    source = """
    home = os.path.expanduser("~")
    os.makedirs(home + "/.cache/x")
    print(os.listdir(home), os.stat(home).st_mode & 0o777 == 0o700)
    """
    assert lines(launchers, source) == ["['.cache'] True"]
    assert [each.name for each in home.iterdir()] == ["secret"]
    assert lines(launchers, "print(open(os.path.expanduser('~/secret')).read())", "--bind", f"{home}:ro") == ["s"]


def test_a_directory_is_bound_to_be_written_to_or_only_to_be_read(launchers):
    inside, read = launchers.outside / "rw", launchers.outside / "ro"
    for each in (inside, read):
        each.mkdir()
        (each / "was").write_text("there")
    link = launchers.outside / "link"
    link.symlink_to(read)
    source = f"""
    print(open({str(inside / "was")!r}).read(), open({str(read / "was")!r}).read(), open({str(link / "was")!r}).read())
    open({str(inside / "new")!r}, "w").write("new")
    try:
        open({str(read / "new")!r}, "w")
    except OSError as error:
        print(error.strerror)
    """
    options = ["--bind", inside, "--bind", f"{read}:ro", "--bind", f"{link}:ro"]
    assert lines(launchers, source, *options) == ["there there there", "Read-only file system"]
    assert (inside / "new").read_text() == "new"


def test_of_the_environment_it_has_what_programs_need_and_what_it_is_given(launchers):
    launchers.environment |= {"SECRET": "s", "PASSED": "p", "TZ": "UTC"}
    source = 'print([os.environ.get(name) for name in ("SECRET", "PASSED", "SET", "TZ", "SYMPHONY_SOCKET")])'
    found = lines(launchers, source, "-e", "PASSED", "--env", "SET=1")
    assert found == [str([None, "p", "1", "UTC", "/run/symphony.sock"])]


def test_a_virtual_environments_packages_come_before_ours(launchers):
    venv = launchers.directory / "venv"
    packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("")
    (packages / "anyio.py").write_text("NAME = 'mine'")
    assert lines(launchers, "import anyio; print(anyio.NAME)", "--venv", venv) == ["mine"]
    done = launchers.symphony("run", "--venv", packages, launchers.script(""), check=False)
    assert done.returncode == 125
    assert f"{packages} is no virtual environment" in done.stderr


def test_a_program_connects_to_what_it_is_granted_and_to_nothing_else(launchers):
    def answer():
        with server.accept()[0] as connection:
            connection.sendall(b"from outside")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        source = f"""
        import socket
        def tried(port, host="localhost"):
            try:
                with socket.create_connection((host, port), 10) as connection: return connection.recv(100)
            except OSError as error:
                return error.strerror
        print(tried({port}), tried({port + 1}), tried(80, "192.0.2.1"))
        """
        granted = lines(launchers, source, "--allow-net", f"localhost:{port}")
    assert granted == ["b'from outside' Connection refused Network is unreachable"]
    assert lines(launchers, source) == ["Permission denied Permission denied Permission denied"]


def test_all_that_is_inside_ends_with_the_program_however_it_forks(own_launchers):
    run = own_launchers.client(
        "run",
        own_launchers.script("""
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                os.fork()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.pause()
        print("ready", flush=True)
        sys.stdin.readline()
        sys.exit(5)
        """),
    )
    run.stdout.readline()
    first = own_launchers.program("prog")["pid"]
    sandbox = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    inside = [int(pid) for pid in eventually(lambda: _all_below(sandbox, 41))]
    run.communicate("\n", timeout=20)
    assert run.returncode == 5
    assert all(map(has_gone, inside))


def _all_below(pid: int, number: int) -> list[str]:
    """Return the descendants, once there are this many."""
    found, todo = [], [str(pid)]
    while todo:
        below = Path(f"/proc/{(each := todo.pop())}/task/{each}/children").read_text().split()
        found += below
        todo += below
    return found if len(found) >= number else []


def test_the_status_is_the_programs_own(launchers):
    for source, status in (("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134), ("sys.exit(3)", 3)):
        assert launchers.symphony("run", launchers.script(source), check=False).returncode == status


def test_a_zygote_that_is_killed_takes_sandboxes_along(own_launchers):
    run = own_launchers.client("run", own_launchers.script("print('ready', flush=True)\ntime.sleep(600)"))
    run.stdout.readline()
    program = own_launchers.program("prog")["pid"]
    end_process(own_launchers.zygote)
    assert has_gone(program)
    assert run.wait(20) == 128 + signal.SIGKILL


def test_where_a_kernel_gives_no_namespaces_nothing_runs_and_the_cause_is_named(own_launchers):
    """Within a user namespace of the test's own, where the number of further ones is bounded to none."""
    program = own_launchers.script("print('ran')")
    command = f"echo 0 > /proc/sys/user/max_user_namespaces; {' '.join(SYMPHONY)} run {program}"
    within = ["unshare", "--user", "--map-root-user", "sh", "-c", command]
    how = {"env": own_launchers.environment, "stdin": subprocess.DEVNULL, "timeout": 60}
    done = subprocess.run(within, check=False, capture_output=True, text=True, **how)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("symphony: no sandbox: its namespaces can't be made")
    assert "sysctl user.max_user_namespaces" in done.stderr


def test_what_is_to_be_shown_and_is_not_there_is_an_error(launchers):
    done = launchers.symphony("run", "--bind", "/no/such", launchers.script(""), check=False)
    assert done.returncode == 125
    assert done.stderr == "symphony: /no/such can't be shown to the program: there is no such file\n"


def test_the_isolation_of_a_program_is_listed(own_launchers):
    own_launchers.symphony("run", own_launchers.script(""))
    own_launchers.symphony("run", "--isolation", "none", "prog.py")
    assert sorted(each["isolation"] for each in own_launchers.ps("--all")) == ["none", "standard"]
    header, *programs = own_launchers.symphony("ps", "--all", check=False).stdout.splitlines()
    place = header.index("ISOLATION")
    assert sorted(line[place:].split()[0] for line in programs) == ["none", "standard"]
