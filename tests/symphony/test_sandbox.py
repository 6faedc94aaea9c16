"""A sandbox's contents, and the user's additions. Its limits are tested by tests/symphony/escapes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from symphony.launcher.sandbox.enter import clone
from tests.symphony.launchers import SYMPHONY, end_process, has_gone
from tests.symphony.sandboxes import needs_sandbox

pytestmark = needs_sandbox


TRIED = """
import socket
def tried(what, *words):
    try:
        what(*words)
        return "done"
    except OSError as error:
        return error.strerror
"""


def lines(launchers, source: str, *options: object) -> list[str]:
    """Run a program in a sandbox, with `tried` defined, and return its output by lines."""
    program = launchers.script(TRIED + textwrap.dedent(source))
    return launchers.symphony("run", *options, program).stdout.splitlines()


@pytest.mark.slow
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


@pytest.mark.slow
def test_only_its_own_directories_can_be_written_to_and_they_are_private_and_bounded(launchers):
    found = lines(
        launchers,
        """
        print([tried(open, path, "w") for path in ("/x", "/usr/x", "/etc/x", "here", sys.prefix + "/x")])
        print([tried(open, path, "w") for path in ("/tmp/x", "/var/tmp/x", "/dev/shm/x", "/dev/null")])
        try:
            with open("/tmp/much", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            print(error.strerror, os.path.getsize("/tmp/much") >> 20 <= 256, os.statvfs("/dev/shm").f_bavail)
        print(os.statvfs("/tmp").f_files)
        """,
    )
    assert found[:2] == [str(["Read-only file system"] * 5), str(["done"] * 4)]
    assert found[2:] == ["No space left on device True 0", "100000"], "they share it"
    assert not (launchers.directory / "here").exists()
    assert not Path("/tmp/much").exists()


@pytest.mark.slow
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


@pytest.mark.slow
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
    print(tried(open, {str(read / "new")!r}, "w"))
    """
    options = ["--bind", inside, "--bind", f"{read}:ro", "--bind", f"{link}:ro"]
    assert lines(launchers, source, *options) == ["there there there", "Read-only file system"]
    assert (inside / "new").read_text() == "new"


def test_of_the_environment_it_has_what_programs_need_and_what_it_is_given(launchers):
    launchers.environment |= {"SECRET": "s", "PASSED": "p", "TZ": "UTC"}
    source = 'print([os.environ.get(name) for name in ("SECRET", "PASSED", "SET", "TZ", "SYMPHONY_SOCKET")])'
    found = lines(launchers, source, "-e", "PASSED", "--env", "SET=1")
    assert found == [str([None, "p", "1", "UTC", "/run/symphony.sock"])]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_program_connects_to_what_it_is_granted_and_to_nothing_else(launchers):
    def answer():
        with server.accept()[0] as connection:
            connection.sendall(b"from outside")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        source = f"""
        def asks(host, port):
            with socket.create_connection((host, port), 10) as connection: print(connection.recv(100))
        for host, port in (("localhost", {port}), ("localhost", {port + 1}), ("192.0.2.1", 80)):
            print(tried(asks, host, port))
        """
        granted = lines(launchers, source, "--allow-net", f"localhost:{port}")
    assert granted == ["b'from outside'", "done", "Connection refused", "Network is unreachable"]
    assert lines(launchers, source) == ["Permission denied"] * 3


@pytest.mark.slow
def test_the_status_is_the_programs_own(launchers):
    for source, status in (("os.abort()", 134), ("sys.exit(3)", 3)):
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


# Sandboxes asked for in odd ways, and the machine's files that stay as they are.


def refusal(launchers, *options: object) -> str:
    """Why nothing runs with these options."""
    done = launchers.symphony("run", *options, launchers.script("print('ran')"), check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_devices_are_used_and_stay_as_they_are(launchers):
    """Nodes of /dev are the machine's own, and root's programs own them."""
    found = lines(
        launchers,
        """
for name in ("null", "zero", "full", "random", "urandom", "tty"):
    path = f"/dev/{name}"
    print(tried(os.chmod, path, os.stat(path).st_mode & 0o777), tried(os.utime, path))
print(open("/dev/null", "w").write("x"), len(open("/dev/urandom", "rb").read(3)))
""",
    )
    assert found == ["Read-only file system Read-only file system"] * 6 + ["1 3"]


def test_a_file_of_the_users_is_bound_where_sandboxes_have_one_of_their_own(launchers):
    """The sandbox writes nothing to the file, for it is the machine's. The kernel's files may be read, too."""
    before = Path("/etc/hosts").stat()
    source = "print(open('/etc/hosts').read(), os.path.isdir('/sys/devices'))"
    found = lines(launchers, source, "--bind", "/etc/hosts:ro", "--bind", "/sys:ro")
    assert "\n".join(found) == f"{Path('/etc/hosts').read_text()} True"
    after = Path("/etc/hosts").stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        *((path, "can't be bound: a sandbox has its own") for path in ("/", "/dev:ro", "/proc/sys", "/run")),
        ("/sys", "can't be bound to be written to: it is the kernel's; bind /sys:ro\n"),
        ("/no/such", "can't be shown to the program: there is no such file\n"),
    ],
)
def test_what_a_sandbox_or_the_kernel_has_of_its_own_or_is_not_there_is_not_bound(launchers, bind, why):
    assert refusal(launchers, "--bind", bind).startswith(f"symphony: {bind.removesuffix(':ro')} {why}")


@pytest.mark.slow
def test_a_directory_that_kv_is_mounted_below_is_not_bound_to_be_written_to(launchers):
    """A program would move what is between them, and choose what the next sandboxes have in KV's place."""
    outer = launchers.outside / "outer"
    (outer / "between/kv").mkdir(parents=True)
    launchers.daemon.mount = str(outer / "between/kv")
    assert refusal(launchers, "--bind", outer) == (
        f"symphony: {outer} can't be bound to be written to: KV is mounted in it, at {outer}/between/kv\n"
    )
    assert lines(launchers, f"print(os.listdir({str(outer)!r}))", "--bind", f"{outer}:ro") == ["['between']"]


def test_a_bind_within_another_has_rights_of_its_own_in_whatever_order_they_come(launchers):
    outer = launchers.outside / "outer"
    for name in ("rw", "ro"):
        (outer / name / "in").mkdir(parents=True)
    options = [f"{outer}/rw", f"{outer}/rw/in:ro", f"{outer}/ro/in", f"{outer}/ro:ro"]
    source = f"""
for name in ("rw", "rw/in", "ro", "ro/in"):
    print(tried(os.mkdir, f"{outer}/{{name}}/new"))
"""
    found = lines(launchers, source, *(word for each in options for word in ("--bind", each)))
    assert found == ["done", "Read-only file system", "Read-only file system", "done"]


def test_kv_has_its_place_wherever_it_is_mounted(launchers):
    """Above it there may be no directory that a sandbox has: /kv is where it is by default."""
    launchers.daemon.mount = "/no-such-directory/kv"
    source = "print(os.listdir('/no-such-directory/kv'), tried(os.mkdir, '/no-such-directory/kv/new'))"
    assert lines(launchers, source) == ["[] Read-only file system"]


def test_of_the_network_a_program_has_tcp_and_udp_alone(launchers):
    """Another protocol would be loaded into the kernel for who asks for it."""
    found = lines(
        launchers,
        """
for kind, protocol in ((1, 0), (1, 6), (2, 0), (2, 17), (1, 132), (1, 262), (2, 136), (3, 0), (3, 17)):
    print(tried(lambda: socket.socket(socket.AF_INET, kind, protocol).close()))
""",
        "--allow-net",
        "localhost:9",
    )
    assert found == ["done"] * 4 + ["Operation not permitted"] * 5


def test_a_program_leaves_to_its_users_others_what_the_kernel_counts_for_all(launchers):
    found = lines(
        launchers,
        """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def all_of(call):
    number = 0
    while call() >= 0:
        number += 1
    return number, errno.errorcode[ctypes.get_errno()]
print(*all_of(lambda: libc.inotify_init()))
context = ctypes.c_ulong(0)
SYS_IO_SETUP = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
print(*all_of(lambda: libc.syscall(SYS_IO_SETUP, 1000, ctypes.byref(context))))
print(open("/proc/sys/user/max_user_namespaces").read().strip())
""",
    )
    assert found == ["32 EMFILE", "0 ENOSYS", "0"]


def test_a_limit_that_the_kernel_could_not_take_is_one_that_it_can(launchers):
    done = launchers.symphony("run", "--processes", "5000000", "--memory", "300000000.5", launchers.script(""))
    assert done.stderr == ""


def test_the_first_process_of_a_sandbox_does_not_read_its_own_words():
    """Else it would take the zygote for living, whose end nobody would tell it."""
    said, say = os.pipe()
    told, tell = os.pipe()
    pipe = os.fstat(say).st_ino
    pid, _ = clone(0, said, say)
    if pid == 0:
        with suppress(OSError):
            if os.fstat(said).st_ino == pipe:  # the number may be that of a later pipe
                os.write(tell, b"open")
        os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    with os.fdopen(told, "rb") as file:
        assert file.read() == b""
    os.close(said)
    os.close(say)


def test_a_user_who_may_have_few_processes_has_programs_with_fewer(launchers):
    program = launchers.script("import resource; print(resource.getrlimit(resource.RLIMIT_NPROC))")
    limited = ["prlimit", "--nproc=500:500", *SYMPHONY, "run", program]
    done = subprocess.run(limited, check=False, capture_output=True, text=True, env=launchers.environment, timeout=60)
    assert (done.stdout, done.stderr) == ("(500, 500)\n", "")


def test_a_program_is_found_over_links_that_lead_from_one_to_the_next(launchers):
    """The first is where it is started; the others are in directories that nobody else wants to see."""
    for name in ("links", "program"):
        (launchers.outside / name).mkdir()
    (launchers.outside / "program" / "real.py").write_text("import beside; print(beside.NAME)")
    (launchers.outside / "program" / "beside.py").write_text("NAME = 'beside'")
    (launchers.outside / "links" / "second.py").symlink_to("../program/real.py")
    (launchers.directory / "first.py").symlink_to(launchers.outside / "links" / "second.py")
    assert launchers.symphony("run", "first.py").stdout == "beside\n"


def test_a_bind_that_a_link_in_another_leads_to_is_there_by_both_names(launchers):
    target, outer = launchers.outside / "target", launchers.outside / "outer"
    (target / "deep" / "in").mkdir(parents=True)
    outer.mkdir()
    (outer / "link").symlink_to(target)
    source = f"print(os.listdir({str(outer / 'link' / 'deep')!r}), os.listdir({str(target / 'deep')!r}))"
    assert lines(launchers, source, "--bind", outer, "--bind", outer / "link" / "deep") == ["['in'] ['in']"]


def test_a_terminal_is_opened_by_the_names_of_standard_streams(launchers):
    """Shell scripts open it so; the terminal is in no directory that a sandbox has."""
    source = "print(os.isatty(1), [tried(open, f'/dev/{name}') for name in ('stdin', 'stdout', 'tty')])"
    assert lines(launchers, source, "--tty") == ["True ['done', 'done', 'done']"]


@pytest.mark.parametrize(
    ("directory", "seen"), [("/proc/sys", "1 ['abi']"), ("/dev/shm", "0 []"), ("/sys/kernel", "1 []")]
)
def test_a_working_directory_of_the_machines_is_not_shown(launchers, directory, seen):
    source = "import os; print(os.getcwd(), os.statvfs('.').f_flag & os.ST_RDONLY, os.listdir('.')[:1])"
    command = [*SYMPHONY, "run", launchers.script(source)]
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        done = subprocess.run(command, env=launchers.environment, cwd=directory, capture_output=True, check=True)
    assert done.stdout.decode() == f"{directory} {seen}\n"


@pytest.mark.skipif(os.getuid() != 0, reason="NO LATER MOUNT TESTED: only root mounts")
def test_what_the_machine_mounts_later_is_not_in_a_sandbox_and_so_not_without_its_limits(launchers):
    """Below a bind that is only to be read a mount that comes by itself could be written to."""
    outer = launchers.outside / "outer"
    below = outer / "read" / "below"
    below.mkdir(parents=True)
    subprocess.run(["mount", "--bind", outer, outer], check=True)
    try:
        subprocess.run(["mount", "--make-shared", outer], check=True)
        source = f"""
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            os.mkdir({str(below / "new")!r})
        except OSError as error:
            print(error.strerror)
        """
        run = launchers.client("run", "--bind", outer, "--bind", f"{outer}/read:ro", launchers.script(source))
        run.stdout.readline()
        subprocess.run(["mount", "-t", "tmpfs", "later", below], check=True)
        assert run.communicate("\n", timeout=20)[0] == "Read-only file system\n"
    finally:
        subprocess.run(["umount", "--recursive", outer], check=True)
