"""Rare conditions of users: closed descriptors, odd names, full places, processes that run away."""

import asyncio
import fcntl
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from symphony.launcher.common import wire
from symphony.launcher.common.places import Refused
from symphony.launcher.common.spec import checked
from symphony.launcher.common.wire import OUTPUT
from symphony.launcher.supervising.program_log import LEFT_OUT, LogReader, ProgramLog
from symphony.launcher.supervising.streams import Streams
from symphony.launcher.supervising.zygote_process import ZygoteProcess
from symphony.launcher.zygote.zygote_start import StartedZygote
from tests.symphony.launchers import SYMPHONY, eventually


@pytest.fixture
def prog(launchers):
    return launchers.script("import os; os.write(1, b'hi\\n')")


def through_a_shell(launchers, words, redirected) -> subprocess.CompletedProcess:
    command = ["sh", "-c", f'"$@" {redirected}', "sh", *SYMPHONY, *map(str, words)]
    how = {"env": launchers.environment, "cwd": launchers.directory, "timeout": 20, "text": True}
    return subprocess.run(command, check=False, capture_output=True, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "shown", "status", "said"),
    [
        ("<&-", "hi\n", 0, ""),
        (">&-", "", 0, ""),
        ("<&- >&- 2>&-", "", 0, ""),
        ("> /dev/full", "", 125, "symphony: what the program writes can't be passed on: No space left on device\n"),
    ],
)
def test_a_command_with_closed_or_full_streams_runs_its_program(launchers, prog, streams, shown, status, said):
    done = through_a_shell(launchers, ["run", prog], streams)
    assert (done.returncode, done.stdout, done.stderr) == (status, shown, said)
    assert launchers.symphony("logs", "prog").stdout == "hi\n"


def test_a_launcher_holds_nothing_of_the_command_that_started_it(own_launchers):
    """Neither a lock, nor the end of a pipe, nor a directory, whatever numbers the descriptors have."""
    launchers = own_launchers
    held = [os.open(launchers.directory, os.O_RDONLY) for _ in range(20)]
    launchers.symphony("run", launchers.script(""), pass_fds=held)
    for pid in (launchers.pid, launchers.zygote):
        assert launchers.directory not in [each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir()]
        assert str(Path(f"/proc/{pid}/cwd").readlink()) == "/"
    for each in held:
        os.close(each)
    with (launchers.state / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_directory_that_was_removed_is_no_place_to_run_in(launchers, prog):
    words = " ".join([*SYMPHONY, "run", str(prog)])
    done = through_a_shell(launchers, ["ps"], f">&-; mkdir gone; cd gone; rmdir ../gone; {words}")
    assert done.returncode == 125
    assert "symphony: this directory can't be named: No such file or directory\n" in done.stderr


@pytest.mark.slow
def test_ps_shows_no_control_character_of_an_argument(launchers, prog):
    launchers.environment["PYTHONIOENCODING"] = "utf-8:strict"
    launchers.symphony("run", "-d", prog, b"\xff".decode("utf-8", "surrogateescape"), "a\x1b[2J\nb")
    launchers.symphony("wait", "prog")
    assert launchers.symphony("ps", "--all", check=False).stdout.splitlines()[-1].endswith(r" \udcff a\x1b[2J\nb")


@pytest.mark.slow
def test_kill_goes_on_behind_one_that_is_not_there(launchers):
    launchers.symphony("run", "-d", launchers.script("time.sleep(600)"))
    done = launchers.symphony("kill", "nobody", "prog", check=False)
    assert (done.returncode, done.stderr.count("no program nobody")) == (1, 1)
    assert launchers.symphony("wait", "prog", check=False).returncode == 143


def test_who_gives_a_program_input_hears_that_it_was_taken_whoever_else_gives(tmp_path):
    asyncio.run(asyncio.wait_for(_two_give(tmp_path), 20))


async def _two_give(directory: Path) -> None:
    """Give two inputs at once, each larger than a pipe."""
    streams = Streams(ProgramLog(directory), has_input=True, window=None, error_apart=True, on_output=lambda: None)
    taken = [asyncio.Event(), asyncio.Event()]
    for each in taken:
        streams.give(b"x" * 100_000, each.set)
    left = 200_000
    while left:
        left -= len(await asyncio.to_thread(os.read, streams.stdin, left))
    for each in taken:
        await each.wait()
    streams.abandon()


RUNS_AWAY = """
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)
            with open("alive", "w") as file:
                file.write(str(os.getpid()))
    time.sleep(600)
"""


def test_what_forks_faster_than_it_is_killed_ends_with_its_zygote(own_launchers):
    launchers = own_launchers
    alive = launchers.directory / "alive"

    def has_stopped() -> bool:
        alive.unlink(missing_ok=True)
        signal.sigtimedwait([], 0.3)  # nothing tells of what does not happen
        return not alive.exists()

    launchers.symphony("run", "--isolation", "none", "-d", launchers.script(RUNS_AWAY))
    eventually(alive.exists)
    os.kill(launchers.zygote, signal.SIGKILL)
    assert launchers.symphony("wait", "prog", check=False).returncode == 137
    eventually(has_stopped)
    assert launchers.symphony("run", "--isolation", "none", launchers.script("print('hi')")).stdout == "hi\n"


def test_half_a_record_of_a_full_disk_is_taken_back(tmp_path):
    log = ProgramLog(tmp_path)
    log.append(OUTPUT, b"first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.size + 30, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.append(OUTPUT, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.append(OUTPUT, b"second")
    reader = LogReader(log)
    assert [reader.read(1000) for _ in range(3)] == [(OUTPUT, b"first"), (OUTPUT, b"second"), None]
    reader.close()
    log.close()


@pytest.mark.parametrize(("num_files", "first"), [(2, b"0"), (3, LEFT_OUT)])
def test_a_reader_that_comes_after_output_was_removed_says_so(tmp_path, monkeypatch, num_files, first):
    monkeypatch.setattr("symphony.launcher.supervising.program_log.SEGMENT_BYTES", 1)
    log = ProgramLog(tmp_path)
    for number in range(num_files):
        log.append(OUTPUT, b"%d" % number)
    reader = LogReader(log)
    seen = [content for _, content in iter(lambda: reader.read(1000), None)]
    assert (seen[0], seen[-2:]) == (first, [b"%d" % (num_files - 2), b"%d" % (num_files - 1)])
    reader.close()
    log.close()


def test_a_variable_whose_name_no_environment_can_have_is_refused():
    for name in ("", "A=B"):
        with pytest.raises(Refused, match="is no name of a variable"):
            checked({"path": "p", "python": True, "env": {name: "x"}})


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (b"+", None),
        (b"", (125, "ended before the program ran")),
        (b'{"error": "no sandbox", "status": 125}', (125, "no sandbox")),
        (b'+{"error": "no such file", "status": 127}', (127, "no such file")),
    ],
)
def test_a_process_that_ends_before_it_is_the_program_is_no_programs_end(said, heard):
    async def hears():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report, say = os.pipe2(os.O_NONBLOCK)
        zygote = ZygoteProcess(StartedZygote(0, ours), lambda: None)
        os.write(say, said) if said else None
        os.close(say)
        try:
            await zygote._hear(report)
        except Refused as error:
            return error.status, str(error)
        finally:
            zygote.close()
            theirs.close()
            os.close(report)

    found = asyncio.run(hears())
    assert (found is None) == (heard is None)
    assert heard is None or (found[0] == heard[0] and heard[1] in found[1])


def test_what_was_sent_before_the_other_went_is_heard_though_it_had_not_read_all():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(wire.INPUT)
        wire.send(theirs, {"event": "ended"})
        theirs.close()
        assert wire.receive(ours) == (wire.JSON, {"event": "ended"})
        assert wire.receive(ours)[0] == b""
