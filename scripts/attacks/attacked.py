"""A daemon for an attack, and helpers that run the attacker, who is another user.

    with daemon("--kv-memory", "64M") as served:
        as_user(ATTACKER, ["touch", served.mount / "mine"])
        as_user(ATTACKER, "sym.kv_create().close()", served=served)

An attack is a script that root runs. `verdict` prints the script's only line and returns its exit status: 0 if the
defence held, 1 if the attack works.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ATTACKER, VICTIM = 4242, 4243
ANSWER_S = 30
"""Time after which a command counts as hung."""
HELD = os.environ.get("SYMPHONY_ATTACKS_HELD")
"""Environment variable that names a file. The file gets the longest holds of each daemon's main thread, for
scripts/soak/attacks.py.
"""

_BECOME = """
import array, encodings.idna, errno, fcntl, itertools, json, mmap, os, resource, select
import shutil, signal, socket, struct, subprocess, sys, threading, time
import libsym as sym
uid = int(sys.argv.pop(1))
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
"""
"""Code that runs before a user's code. The code imports modules as root, since the user may be unable to read their
files.
"""


@dataclass(frozen=True)
class Daemon:
    """Daemon that serves every user."""

    socket: Path
    mount: Path
    state: Path
    log: Path
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SYMPHONY_SOCKET": str(self.socket), "PYTHONPATH": str(ROOT)}

    def serves(self) -> bool:
        """Return whether the daemon lives and its mount answers."""
        if self.process.poll() is not None or not os.path.ismount(self.mount):
            return False
        return as_user(0, ["ls", self.mount]).returncode == 0


def as_user(
    uid: int, what: str | Sequence[object], *arguments: object, served: Daemon | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code, or a command, as a user without groups. The output is text.

    Code can use `sym` and the modules that `_BECOME` imports; its `arguments` are in `sys.argv[1:]`. A command that
    takes longer than ANSWER_S raises subprocess.TimeoutExpired.
    """
    how = {"capture_output": True, "text": True, "timeout": ANSWER_S, "cwd": "/", **how}
    how.setdefault("env", served.environment if served else os.environ | {"PYTHONPATH": str(ROOT)})
    if isinstance(what, str):
        source = _BECOME + textwrap.dedent(what)
        return subprocess.run([sys.executable, "-c", source, str(uid), *map(str, arguments)], check=False, **how)
    command = list(map(str, [*what, *arguments]))
    return subprocess.run(command, check=False, user=uid, group=uid, extra_groups=[], **how)


@contextmanager
def running_as(uid: int, code: str, *arguments: object, served: Daemon) -> Iterator[subprocess.Popen[str]]:
    """Run Python code as in `as_user` until the attack is over. The end of its input tells the code to end."""
    command = list(map(str, [sys.executable, "-c", _BECOME + textwrap.dedent(code), uid, *arguments]))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/", env=served.environment) as process:
        yield process


def of_root(served: Daemon, tree: Path, *words: object) -> dict[str, Any]:
    """Return subprocess arguments for `symphony WORDS` as root, with a launcher beside the daemon."""
    environment = served.environment | {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(served.state.parent)}
    command = [sys.executable, "-P", "-m", "symphony", *map(str, words)]
    return {"args": command, "env": environment, "cwd": served.state.parent, "text": True}


def memory_bytes(served: Daemon) -> int:
    """Return the daemon's resident memory in bytes."""
    return int(Path(f"/proc/{served.pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_us(pid: int) -> float:
    """Return the CPU time of a process's living threads, in microseconds."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1000


@contextmanager
def daemon(*options: object, tree: Path = ROOT) -> Iterator[Daemon]:
    """Run a daemon until the attack is over. At the end the daemon and its files are removed.

    `tree`: the built checkout from which the daemon runs.
    """
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        where = Path(directory)
        where.chmod(0o755)
        mount, socket, state, log = where / "kv", where / "socket", where / "state", where / "log"
        mount.mkdir()
        command = [sys.executable, "-m", "symphony", "serve", "--model", "tiny", "--mount", mount]
        command += ["--socket", socket, "--state", state, *options]
        environment = os.environ | {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": directory}
        with (
            log.open("w") as errors,
            subprocess.Popen(
                list(map(str, command)), cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("symphony:"), log.read_text()
                mount.chmod(0o1777)
                yield (served := Daemon(socket, mount, state, log, process))
                if HELD is not None and served.process.poll() is None:
                    _note_held(served, HELD)
            finally:
                _end(process)
                subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
                for control in where.glob("symphony/*/control"):
                    _end_launcher(int((control.parent / "lock").read_text()))


def _end_launcher(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(pidfd, "rb", buffering=0):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            if select.select([pidfd], [], [], ANSWER_S)[0]:
                return


def _note_held(served: Daemon, file: str) -> None:
    """Append the longest holds of the daemon's main thread to `file`, as one line of JSON."""
    asked = as_user(0, [sys.executable, "-m", "symphony", "stat", "--json"], served=served)
    with Path(file).open("a") as told:
        told.write(json.dumps(json.loads(asked.stdout)["held"]) + "\n")


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            continue
        return


class Program:
    """Program of a user that obeys lines `WHAT COUNT`, and reports when the work of a line is done."""

    def __init__(self, process: subprocess.Popen[str], daemon_pid: int) -> None:
        self._process, self._daemon_pid = process, daemon_pid

    def begin(self, what: str, count: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()

    def wait(self) -> str:
        """Wait until the program reports the end or the start of its work. Return the reported line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has failed: see above"
        return line.strip()

    def cost_us(self, what: str, count: int) -> float:
        """Return the daemon's CPU time for one call in microseconds, measured over `count` calls."""
        before_us = processor_us(self._daemon_pid)
        self.begin(what, count)
        self.wait()
        return (processor_us(self._daemon_pid) - before_us) / count


@contextmanager
def program(served: Daemon, uid: int, code: str, *arguments: object) -> Iterator[Program]:
    """Run a program of a user within the block. Its first line reports that it has started."""
    command = [sys.executable, "-c", _BECOME + textwrap.dedent(code), str(uid), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/", env=served.environment) as process:
        try:
            found = Program(process, served.pid)
            found.wait()
            yield found
        finally:
            process.kill()


def options(description: str | None) -> argparse.Namespace:
    """Read the options of every attack: `--quick` and `--tree`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: the form that the suite runs")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is attacked")
    return parser.parse_args()


def verdict(held: str, broken: Sequence[str]) -> int:
    """Print the defences that held, or the gains of the attack. Return the exit status."""
    print(f"BROKEN: {'; '.join(broken)}" if broken else f"held: {held}")
    return 1 if broken else 0


@dataclass(frozen=True)
class Gateway:
    """Gateway that root runs in front of a daemon."""

    port: int
    key: str
    """Key of the gateway. Empty: the gateway is of an old release without a key."""
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def gateway(served: Daemon, *options: object, tree: Path = ROOT, wrapper: Sequence[object] = ()) -> Iterator[Gateway]:
    """Run a gateway until the attack is over. `wrapper`: the beginning of the command that starts the gateway.

    If the gateway does not start, RuntimeError has the reason.
    """
    command = [*wrapper, sys.executable, "-m", "lips.gateway", "--port", "0", *options]
    environment = served.environment | {
        "PYTHONPATH": str(tree),
        "XDG_STATE_HOME": str(served.state.parent / "of_gateway"),
    }
    with (
        (served.state.parent / "gateway.log").open("w+") as said,
        subprocess.Popen(list(map(str, command)), cwd=tree, env=environment, stderr=said, text=True) as process,
    ):
        try:
            Path(said.name).chmod(0o600)
            lines, end_s = list[str](), time.monotonic() + ANSWER_S
            while len(lines) < 2 and process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.02)
                if not lines and Path(said.name).stat().st_size:
                    end_s = time.monotonic() + 0.5  # an old release prints no more lines
                lines = Path(said.name).read_text().splitlines()
            lines = Path(said.name).read_text().splitlines()
            if not lines:
                raise RuntimeError("the gateway did not start")
            if not lines[0].startswith("gateway: http://"):
                raise RuntimeError("\n".join(lines))
            port = int(lines[0].rpartition(":")[2])
            key = lines[1].partition("#key=")[2] if len(lines) > 1 else ""
            yield Gateway(port, key, process.pid)
        finally:
            _end(process)
