"""Words between a daemon and its service manager: readiness, the watchdog, sockets, a reload; and the log."""

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from symphony.service.notify import Notifier
from tests.symphony.daemons import SYMPHONY
from tests.symphony.services import OTHER_UID, Manager, as_user

TINY = ("--model", "tiny", "--kv-memory", "8M")
STUCK = """
from symphony.daemon import backends

load = backends._load_cpu

class Stuck:
    \"\"\"A decoder in Python, of which a step ends when it is told to.\"\"\"
    def __init__(self, decoder):
        self.step, self.close = self.stop_and_step, decoder.close
        self.decoder = decoder
    def stop_and_step(self, batch):
        sys.stdin.readline()
        self.decoder.step(batch)

backends._load_cpu = lambda *words: backends.Loaded(Stuck(load(*words).decoder))
"""
SLOWLY = """
import symphony.daemon.models

load_model = symphony.daemon.models.load_model

def when_told(name):
    print("symphony: is building", flush=True)
    sys.stdin.readline()
    return load_model(name)

symphony.daemon.models.load_model = when_told
"""
ONE_STEP = "kv = sym.kv_create(); sym.pred(kv, [1, 2, 3]); print(len(kv))"

pytestmark = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed to this user"
)


@pytest.fixture
def manager():
    manager = Manager()
    yield manager
    manager.close()


def test_the_service_manager_hears_of_every_stage(start_daemon, manager, tmp_path):
    config = tmp_path / "symphony.toml"
    config.write_text('model = "tiny"\nkv_memory = "8M"\n')
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "400000"}
    daemon = start_daemon("--config", str(config), environment=environment)
    status = manager.until("READY")["STATUS"]
    while status != f"tiny on {daemon.mount}, weights loaded":
        assert status == f"tiny on {daemon.mount}, weights loading"
        status = manager.until("STATUS")["STATUS"]
    for _ in range(3):
        manager.until("WATCHDOG")
    daemon.process.send_signal(signal.SIGHUP)
    assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) > 0
    manager.until("READY")
    assert daemon.stop() == 0
    assert manager.until("STOPPING")


def test_words_of_the_service_manager_are_for_the_daemons_own_process(manager):
    for about, is_ours in (("", True), (str(os.getpid()), True), ("1", False)):
        environment = {
            "NOTIFY_SOCKET": str(manager.path),
            "WATCHDOG_USEC": "400000",
            "WATCHDOG_PID": about,
            "HOME": "/",
        }
        notifier = Notifier(environment)
        assert notifier.watchdog_s == pytest.approx(0.4 if is_ours else 0)
        assert environment == {"HOME": "/"}, "children can't speak for it"
        notifier.alive()
        assert manager.next() == {"WATCHDOG": "1"}


def test_the_watchdog_starves_while_a_step_hangs_and_is_fed_again_when_it_ends(start_planted, manager):
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "400000"}
    daemon = start_planted(STUCK, *TINY, "--watchdog", "1", environment=environment)
    program = daemon.program(ONE_STEP)
    while "a step has been computed for" not in manager.until("STATUS")["STATUS"]:
        pass
    with pytest.raises(TimeoutError):
        manager.next(timeout_s=2)
    assert "the watchdog is not fed" in daemon.log.read_text()
    # Names and files are served all the same.
    assert daemon.shell(f"ls -a {daemon.mount}/.symphony").returncode == 0
    daemon.tell()
    assert "WATCHDOG" in manager.until("WATCHDOG")
    assert program.communicate(timeout=60)[0] == "3\n"


def handed_over(*sockets: socket.socket, then=("-m", "symphony"), announced: int | None = None) -> list[str]:
    """Command that starts `symphony`, or another module, with these from descriptor 3 on."""
    numbers = [each.fileno() for each in sockets]
    source = f"""
import fcntl, os, sys
away = [fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in {numbers}]
os.closerange(3, 100)
for place, number in enumerate(away):
    os.dup2(number, 3 + place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="{announced or len(numbers)}")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    return [sys.executable, "-c", source, *then]


@pytest.fixture
def listening(tmp_path):
    """Return listening sockets, as symphony.socket has them."""
    with ExitStack() as stack:
        made = []
        for kind, name in ((socket.SOCK_STREAM, "symphony.sock"), (socket.SOCK_SEQPACKET, "symphony.sock.programs")):
            made.append(stack.enter_context(socket.socket(socket.AF_UNIX, kind)))
            made[-1].bind(str(tmp_path / name))
            made[-1].listen(64)
            made[-1].set_inheritable(True)
        yield made


def test_a_daemon_takes_the_sockets_that_it_is_handed_and_leaves_them_there(start_daemon, listening, tmp_path):
    """Programs connect before the daemon is there, and while it is started again: they wait."""
    early = socket.socket(socket.AF_UNIX)
    early.connect(str(tmp_path / "symphony.sock"))
    daemon = start_daemon(*TINY, command=handed_over(*listening), inherited=listening)
    assert daemon.run(ONE_STEP) == "3\n"
    assert daemon.symphony("run", "--list").returncode == 0
    early.close()
    assert daemon.stop() == 0
    assert daemon.socket.is_socket()
    waits = daemon.program(ONE_STEP)
    start_daemon(*TINY, command=handed_over(*listening), inherited=listening)
    assert waits.communicate(timeout=60) == ("3\n", "")


TAKES = """
import sys
from pathlib import Path
from symphony.daemon.sockets import Sockets
from symphony.service.activation import activated
Sockets(Path(sys.argv[1]), activated())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "name", "why"),
    [
        (1, "symphony.sock", "one ListenStream= and one ListenSequentialPacket= are needed"),
        (2, "other", "socket is {path}/other, and the service manager listens at {path}/symphony.sock"),
        (0, "symphony.sock", "descriptor 3 is handed over, and is no socket"),
    ],
)
def test_sockets_that_do_not_fit_are_refused(listening, tmp_path, count, name, why):
    command = handed_over(*listening[:count], then=("-c", TAKES), announced=count or 2)
    fds = [each.fileno() for each in listening]
    done = subprocess.run([*command, tmp_path / name], capture_output=True, text=True, check=False, pass_fds=fds)
    assert why.format(path=tmp_path) in done.stderr.splitlines()[-1]


# Reload


def test_a_reload_changes_what_it_can_at_once_names_what_needs_a_restart_and_ends_no_thread(
    start_daemon, open_to_all, tmp_path
):
    if os.geteuid() != 0:
        pytest.skip("NO QUOTA TESTED: another user needs root")
    base = 'model = "tiny"\nkv_memory = "8M"\n'
    config = tmp_path / "symphony.toml"
    config.write_text(base)
    daemon = start_daemon("--config", str(config), "--starts", "50")
    told = as_user(OTHER_UID, "print(sym.daemon_stat()['quota_files'], sym.daemon_stat()['weight'])")
    holder = daemon.program(as_user(OTHER_UID, "sym.connect(); print(1, flush=True); input()"))
    holder.stdout.readline()  # its account is there already
    assert daemon.run(told) == "None 1.0\n"
    config.write_text(
        'model = "tiny"\nkv_memory = "16M"\nquota_files = 7\nstarts = 9\nstep_ms = 40\ndisk_timeout = 5\n'
        f"verbose = true\n[weight]\n{OTHER_UID} = 3\n"
    )
    said = daemon.symphony("reload").stdout
    assert said == "changed: disk_timeout, step_ms, quota_files, weight, verbose\nneeds a restart: kv_memory\n"
    assert daemon.run(told) == "7 3.0\n"
    assert "program" in daemon.log.read_text()  # connections are logged now
    config.write_text(base + 'quota_files = 9\nstep_ms = "soon"\n')
    done = daemon.symphony("reload", check=False)
    assert done.returncode == 1
    assert f"nothing is changed: {config}:4: step_ms is 'soon'" in done.stderr
    assert daemon.run(told) == "7 3.0\n"
    config.write_text(base)
    assert "needs a restart" not in daemon.symphony("reload").stdout
    assert daemon.run(told) == "None 1.0\n"
    assert daemon.stat()["config"]["reloads"] == 3
    holder.communicate("\n", timeout=60)
    # With two reloads at once, for one, the kernel gives a signal to any thread.
    for thread in Path(f"/proc/{daemon.process.pid}/task").iterdir():
        ctypes.CDLL(None).tgkill(daemon.process.pid, int(thread.name), signal.SIGHUP)
    assert daemon.symphony("reload").stdout == "changed: nothing\n"
    assert daemon.run(ONE_STEP) == "3\n"


def test_a_reload_while_the_daemon_is_built_waits_until_it_is_ready(start_planted, manager, tmp_path):
    """Else SIGHUP would end it, or it would say that it is ready before it is."""
    config = tmp_path / "symphony.toml"
    config.write_text('model = "tiny"\nkv_memory = "8M"\nstarts = 7\n')
    daemon = start_planted(SLOWLY, "--config", str(config), environment={"NOTIFY_SOCKET": str(manager.path)})
    config.write_text('model = "tiny"\nkv_memory = "8M"\nstarts = 8\n')
    daemon.process.send_signal(signal.SIGHUP)
    daemon.tell()
    assert "symphony: tiny on" in daemon.process.stdout.readline()
    assert "READY" in manager.next()
    manager.until("RELOADING")
    manager.until("READY")
    assert daemon.stat()["config"]["changed"] == ["starts"]


@pytest.mark.slow
def test_a_daemon_without_a_file_has_nothing_to_read_again(shared):
    done = shared.symphony("reload", check=False)
    assert (done.returncode, "start it with --config" in done.stderr) == (1, True)
    assert shared.stat()["pid"]


# The log


def test_lines_of_json_say_which_program_and_user_they_are_about(start_daemon):
    daemon = start_daemon(*TINY, "--log", "json", "--verbose")
    daemon.run("with sym.kv_create('old.kv') as kv: sym.kv_advise(kv, sym.TTL(0.2)); sym.pred(kv, [1])")
    daemon.shell("while [ -e kv/old.kv ]; do sleep 0.05; done")
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    connected = next(line for line in lines if "connected" in line["message"])
    assert (connected["level"], connected["user"]) == ("debug", os.getuid())
    assert str(connected["program"]) in connected["message"]
    expired = next(line for line in lines if "expires" in line["message"])
    assert (expired["file"], expired["logger"]) == ("/old.kv", "kvfs.volume.expiry")


def fields_of(data: bytes) -> list[tuple[str, str]]:
    """Parse an entry's fields as systemd's journal does."""
    found = []
    while data:
        name, equals, rest = data.partition(b"\n")[0].partition(b"=")
        if equals:
            data = data[len(name) + len(rest) + 2 :]
        else:
            (size,) = struct.unpack_from("<Q", data, len(name) + 1)
            start = len(name) + 9
            rest, data = data[start : start + size], data[start + size + 1 :]
        found.append((name.decode(), rest.decode()))
    return found


LOG_TO = """
import logging, sys
from pathlib import Path
from symphony.service.journal import JournalHandler
log = logging.getLogger("tests.journal")
log.addHandler(JournalHandler(Path(sys.argv[1])))
log.error("broken: %s\\nand more", "x", extra={"program": 17, "user": 1000, "file": ["/a.kv", "/b.kv"]})
log.warning("large: %s", "y" * 1_000_000)
logging.raiseExceptions = False
log.warning("wrong: %d", "x")
"""


def test_the_journal_gets_fields_that_it_can_be_searched_by(tmp_path):
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        journal.settimeout(60)
        subprocess.run([sys.executable, "-c", LOG_TO, path], check=True, timeout=60)
        first = fields_of(journal.recv(1 << 20))
        _, descriptors, _, _ = socket.recv_fds(journal, 64, 1)
    values = dict(first)
    assert values["MESSAGE"] == "broken: x\nand more"
    assert (values["PRIORITY"], values["PROGRAM"], values["SYM_USER"]) == ("3", "17", "1000")
    assert values["SYSLOG_IDENTIFIER"] == "symphony"
    assert [value for name, value in first if name == "KV_FILE"] == ["/a.kv", "/b.kv"]
    with os.fdopen(descriptors[0], "rb") as large:
        large.seek(0)
        assert dict(fields_of(large.read()))["MESSAGE"] == "large: " + "y" * 1_000_000


@pytest.mark.slow
def test_a_journal_that_is_not_there_is_an_error(tmp_path):
    if Path("/run/systemd/journal/socket").is_socket():
        pytest.skip("this machine has a journal")
    words = ["serve", *TINY, "--log", "journal", "--state", tmp_path, "--mount", tmp_path]
    done = subprocess.run([*SYMPHONY, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "choose another --log" in done.stderr.splitlines()[-1]
