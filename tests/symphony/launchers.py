"""A launcher of a test's own, with the commands that talk to it, beside a fake daemon."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from symphony.launcher.common.places import Places
from tests.forked import Forked, run
from tests.symphony.programs_socket import ProgramsSocket

SYMPHONY = [sys.executable, "-m", "symphony"]
ROOT = Path(__file__).resolve().parents[2]
PIPES: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
"""Arguments of Popen for a process that a test talks to."""


def started(command: list[Any], **how: Any) -> Any:
    """A process, with pipes or without: who reads one knows that it is there."""
    return Forked(command, **how)


class Launchers:
    """The directory of launchers, a daemon's end, and programs."""

    def __init__(self, directory: Path, runtime: Path) -> None:
        """`runtime`: a short path, for there are sockets below it."""
        self.directory = directory
        self.runtime = self.outside = runtime
        """`outside`: a place for files that no sandbox shows unasked."""
        self.socket = runtime / "d.sock"
        self.daemon = ProgramsSocket(self.socket)
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(runtime),
            "SYMPHONY_SOCKET": str(self.socket),
            "PYTHONPATH": str(ROOT),
        }
        self._clients: list[subprocess.Popen] = []

    def script(self, source: str, name: str = "prog.py") -> Path:
        """Write a program. The file changes at once: an earlier program that starts now never reads a part of it."""
        path = self.directory / name
        new = path.with_name(f"{path.name}.new")
        new.write_text("import os, signal, sys, time\n" + textwrap.dedent(source))
        return new.rename(path)

    def symphony(
        self, *words: object, check: bool = True, text: bool = True, **how: Any
    ) -> subprocess.CompletedProcess:
        """A command, to its end."""
        how |= {"env": self.environment, "cwd": self.directory, "timeout": 60}
        how |= {} if "input" in how else {"stdin": subprocess.DEVNULL}
        command = [*SYMPHONY, *map(str, words)]
        done = run(command, text=text, **how)
        assert not check or done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done

    def client(self, *words: object, nohup: bool = False, **how: Any) -> Any:
        """A command that goes on. SIGHUP ends it without `nohup`, also where the suite itself runs under nohup."""
        how = {"env": self.environment, "cwd": self.directory, **PIPES, **how}
        hang_up = f"--{'ignore' if nohup else 'default'}-signal=HUP"
        client = subprocess.Popen(["env", hang_up, *SYMPHONY, *map(str, words)], **how)
        self._clients.append(client)
        return client

    def ps(self, *words: str) -> list[dict]:
        return json.loads(self.symphony("ps", "--json", *words, check=False).stdout)  # the daemon may be a fake one

    def program(self, name: str) -> dict:
        """Return the latest program of a name."""
        return max((each for each in self.ps("--all") if each["name"] == name), key=lambda each: each["created"])

    @property
    def state(self) -> Path:
        return next((self.runtime / "symphony").iterdir())

    @property
    def pid(self) -> int:
        return int((self.state / "lock").read_text())

    @property
    def zygote(self) -> int:
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    @property
    def log(self) -> str:
        return (self.state / "launcher.log").read_text()

    def end_clients(self) -> None:
        while self._clients:
            client = self._clients.pop()
            client.kill()
            client.wait()
            for pipe in (client.stdin, client.stdout, client.stderr):
                if pipe is not None:
                    pipe.close()

    def end_programs(self) -> None:
        """End the programs of whose end the daemon has not heard, and forget what it was told."""
        told = self.daemon.told
        ended = {each["id"] for each in told if each["do"] == "end"}
        if living := [each["id"] for each in told if each["do"] == "start" and each["id"] not in ended]:
            self.symphony("kill", "-s", "KILL", *living, check=False)
            self.symphony("wait", *living, check=False)
        told.clear()

    def clean_up(self) -> None:
        self.end_clients()
        end_launchers(self.runtime)
        for directory in self.runtime.glob("symphony/*"):  # of launchers that were killed
            for group in cgroups_of(Places(directory, "").key):
                eventually(lambda group=group: _is_removed(group))
        self.daemon.stop()


def cgroups_of(key: str) -> list[Path]:
    """The groups that a launcher has, or left. Others' come and go meanwhile, which `Path.rglob` can't bear."""
    there = (Path(parent, name) for parent, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return [path for path in there if path.name.startswith(f"symphony-{key}-")]


def _is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # the kernel still holds what was killed in it
        return False
    return True


def end_launchers(runtime: Path) -> None:
    """End the launchers below a directory, with their programs."""
    for control in runtime.glob("symphony/*/control"):
        end_process(int((control.parent / "lock").read_text()), signal.SIGTERM)


def end_process(pid: int, number: int = signal.SIGKILL) -> None:
    """Ends a process that is no child of ours, and waits until it has gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    assert has_gone(pid), f"process {pid} does not end"


def has_gone(pid: int, within_s: float = 20) -> bool:
    """Whether a process ends in time; one that nobody has waited for counts."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], within_s)[0])
    finally:
        os.close(pidfd)


def eventually(found, within_s: float = 20):
    """Poll `found` until it gives a true result, and return that; for changes that no descriptor tells of."""
    deadline_s = time.monotonic() + within_s
    while not (result := found()):
        assert time.monotonic() < deadline_s, "it does not come to that"
        time.sleep(0.02)
    return result
