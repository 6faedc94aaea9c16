"""A daemon that is told to end does so at any moment, in time, and says what it could not keep."""

import fcntl
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.disk.recorder import Disk, available
from tests.symphony.daemons import SYMPHONY
from tests.symphony.launchers import eventually

TINY = ("--model", "tiny", "--kv-memory", "16M")
TURNS = 3
HUNG_S = 60
"""Time after which an end counts as hung: what it could wait for takes longer, or for ever."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(available()), reason=available())]

HELD_BUILD = """
import symphony.daemon.models
def load_model(name):
    print("symphony: is building", flush=True)
    threading.Event().wait()
symphony.daemon.models.load_model = load_model
"""
HUNG_STEP = """
import symphony.daemon.backends as backends
class HungDecoder(backends.CpuDecoder):
    native = None
    def step(self, batch):
        print("in a step", flush=True)
        threading.Event().wait()
backends.CpuDecoder = HungDecoder
"""
FAILING_COMMIT = """
from kvfs.durable.cut import Cutter
take = Cutter.take
def planted(cutter, wanted, *rest, **named):
    if any(name == b"planted" for inode in wanted for _, name in inode.names):
        raise RuntimeError("planted")
    return take(cutter, wanted, *rest, **named)
Cutter.take = planted
"""
HANGUP = "signal.signal(signal.SIGHUP, signal.{})"


def assert_nothing_is_left(mount: Path, socket: Path, state: Path) -> None:
    assert f" {mount} " not in Path("/proc/mounts").read_text()
    assert not socket.exists()
    assert not Path(f"{socket}.programs").exists()
    if (state / "lock").exists():
        with (state / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_start_that_is_ended_at_any_moment_leaves_nothing_and_the_next_one_is_fine(start_daemon, tmp_path):
    daemon = start_daemon(*TINY)
    daemon.run("sym.kv_write(sym.kv_create('a.kv'), [1, 2, 3]); sym.kv_sync()")
    daemon.stop()
    draw, state = random.Random(17), tmp_path / "state"
    command = [*SYMPHONY, "serve", "--mount", daemon.mount, "--state", state, *TINY]
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=daemon.environment) as whole:
        assert whole.stdout is not None
        assert whole.stdout.readline()
        whole.terminate()
    took_s, ended = time.monotonic() - began_s, tmp_path / "ended.log"
    for turn in range(TURNS):
        number = draw.choice((signal.SIGTERM, signal.SIGINT))
        with ended.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=daemon.environment)
        time.sleep(took_s * (turn + draw.random()) / TURNS)  # any moment will do
        process.send_signal(number)
        status, said = process.wait(HUNG_S), ended.read_text()
        has_begun = "init_import_site" not in said  # else Python itself was not ready for a signal
        assert status in (0, 130, -number) or not has_begun, said
        assert_nothing_is_left(daemon.mount, daemon.socket, state)
    daemon = start_daemon(*TINY)
    assert daemon.run("print(sym.kv_open('a.kv').len())") == "3\n"


def test_a_terminal_that_closes_ends_a_daemon_without_a_file_but_for_nohup(start_planted, tmp_path):
    daemon = start_planted(HANGUP.format("SIG_IGN"), *TINY)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.run("sym.kv_create('a.kv').close(); print(len(sym.kv_list()))") == "1\n"
    assert daemon.stop() == 0
    daemon = start_planted(HANGUP.format("SIG_DFL"), *TINY)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.process.wait(HUNG_S) == 0
    assert "SIGHUP: closing" in daemon.log.read_text()
    assert_nothing_is_left(daemon.mount, daemon.socket, tmp_path / "state")


def test_what_is_being_built_is_left_at_once(start_planted, tmp_path):
    daemon = start_planted(HELD_BUILD, *TINY)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(HUNG_S) == 0
    assert "SIGTERM: closing" in daemon.log.read_text()
    assert_nothing_is_left(daemon.mount, daemon.socket, tmp_path / "state")


def test_a_step_that_hangs_keeps_no_daemon_beyond_its_limit(start_planted, tmp_path):
    daemon = start_planted(HUNG_STEP, *TINY, "--drain=1")
    program = daemon.program("sym.pred(sym.kv_create(), [1])")
    while daemon.process.stdout.readline() != "in a step\n":
        pass
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(HUNG_S) == 1
    assert "the process ends as by kill -9" in daemon.log.read_text()
    assert_nothing_is_left(daemon.mount, Path("/nonexistent"), tmp_path / "state")
    assert "NotConnected" in program.communicate(timeout=20)[1]


def test_a_disk_that_hangs_is_given_up_in_time_and_what_is_not_kept_is_named(start_daemon, tmp_path):
    with Disk(tmp_path) as disk:
        state = ["--state", str(disk.path / "state")]
        daemon = start_daemon(*TINY, "--drain=2", *state)
        daemon.run("sym.kv_write(sym.kv_create('synced.kv'), [1, 2, 3]); sym.kv_sync()")
        disk.hang()
        daemon.run("for number in range(30): sym.kv_write(sym.kv_create(f'late{number}.kv'), [1])")
        daemon.process.send_signal(signal.SIGTERM)
        log = eventually(lambda: "/late9.kv: " in daemon.log.read_text() and daemon.log.read_text())
        disk.resume()  # else the kernel would keep the process: it waits for its disk
        assert daemon.process.wait(HUNG_S) == 1
        assert "not kept: /late0.kv, " in log
        assert "s were not enough" in log
        assert_nothing_is_left(daemon.mount, daemon.socket, disk.path / "state")
        daemon = start_daemon(*TINY, *state)
        assert daemon.run("print(sym.kv_open('synced.kv').len())") == "3\n"
        assert daemon.stop() == 0


def test_on_a_full_disk_the_rest_is_named_at_once(start_daemon, tmp_path):
    with Disk(tmp_path) as disk:
        state = ["--state", str(disk.path / "state")]
        daemon = start_daemon("--model", "tiny", "--kv-memory", "64M", *state)
        daemon.run("sym.kv_write(sym.kv_create('synced.kv'), [1, 2, 3]); sym.kv_sync()")
        disk.limit(disk.used())
        # More than the 16 MiB by which the file of pages has grown already.
        write = "for n in range(28): sym.kv_write(sym.kv_create(f'late{n}.kv'), [n] * 4000)"
        daemon.run(write)
        assert daemon.stop() == 1
        log = daemon.log.read_text()
        assert "not kept: /late" in log
        assert re.fullmatch(r"symphony: \d+ files are not on disk in their last state: .*", log.splitlines()[-1])
        disk.limit(None)
        daemon = start_daemon("--model", "tiny", "--kv-memory", "64M", *state)
        lengths = daemon.run("for each in sym.kv_list(): print('/' + each.name, sym.kv_open(each.name).len())")
        found = {name: int(length) for name, length in map(str.split, lengths.splitlines())}
        assert found.pop("/synced.kv") == 3
        shorter = {name for name, length in found.items() if length != 4000}
        assert 0 < len(shorter) < len(found) == 28
        assert shorter <= set(re.findall(r"/late\d+\.kv", log)), "what is not named is whole"
        assert daemon.stop() == 0


def test_a_commit_that_fails_ends_the_whole_daemon_and_names_what_is_lost(start_planted, start_daemon, tmp_path):
    daemon = start_planted(FAILING_COMMIT, *TINY, f"--drain={2 * HUNG_S}")
    daemon.shell("echo kept > kv/kept && sync kv/kept && echo lost > kv/planted")
    assert daemon.shell("sync kv/planted", check=False).returncode
    assert daemon.process.wait(HUNG_S) == 1, "and does not wait --drain for commits that never come"
    log = daemon.log.read_text()
    assert "RuntimeError: planted" in log
    assert "not kept: /planted: an error has ended the storage" in log
    daemon.log.write_text("")  # the planted error's traceback is meant
    assert_nothing_is_left(daemon.mount, daemon.socket, tmp_path / "state")
    daemon = start_daemon(*TINY)
    assert daemon.shell("cat kv/kept").stdout == "kept\n"
