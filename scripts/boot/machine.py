"""A Debian root that systemd-nspawn boots, and commands in it.

The machine is not registered, so the host needs no systemd. Commands enter the namespaces of the machine's first
process. A process that needs a cgroup of its own is started inside, by systemd-run or a login.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

HANGS_S = 600.0
"""Time after which a command counts as hung, even on a slow machine under load."""
STOPPED_S = 20.0
FUSE = os.makedev(10, 229)
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PRELUDE = 'set -euo pipefail; not() { ! "$@"; }\n'
"""Prelude of every script. A command that must fail is written `not COMMAND`, because bash ignores failures under
`!`."""


class Failed(Exception):  # noqa: N818 - a failed command, not a defect
    """A command in the machine did not end as expected."""


class Cgroup:
    """Cgroup for the machine alone, on hosts without a manager of cgroups.

    Without this group, the machine's systemd would take over the root cgroup.
    """

    def __init__(self, name: str) -> None:
        known = [line.rstrip().split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        hierarchies = {"name=systemd": "systemd", "": "unified"}
        roots = {hierarchies[which]: path for _, which, path in known if which in hierarchies}
        base = Path("/sys/fs/cgroup")
        self._directories = [
            base / (directory if (base / directory).is_dir() else "") / path.lstrip("/") / name
            for directory, path in roots.items()
        ]

    def enter(self) -> None:
        """Move this process, which becomes the machine's, into the cgroup."""
        for directory in self._directories:
            directory.mkdir(exist_ok=True)
            (directory / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        for directory in self._directories:
            for below, _, _ in os.walk(directory, topdown=False):
                Path(below).rmdir()


class Machine:
    """Directory with a Debian root that boots as a machine."""

    def __init__(self, root: Path, name: str, binds: list[str]) -> None:
        self.root = root
        self.console = root.with_suffix(".console")
        self._name = name
        self._binds = binds
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._cgroup = None if Path("/run/systemd/system").is_dir() else Cgroup(name)

    def boot(self) -> None:
        """Boot the root. Return when all units that start at boot have started."""
        node = self.root.with_suffix(".fuse")  # made as udev makes it, but separate from the host's
        if not node.exists():
            os.mknod(node, 0o666 | 0o020000, FUSE)
            node.chmod(0o666)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = f"\0{self._name}"
            notified.bind(address)
            notified.settimeout(HANGS_S)
            words = ["--boot", "--register=no", "--notify-ready=yes", "--private-network", "--console=pipe"]
            words += ["--system-call-filter=@known"]  # nspawn's own filter is older than Landlock
            words += ["--keep-unit"] if self._cgroup else []
            words += [f"--bind={node}:/dev/fuse", *(f"--bind-ro={each}" for each in self._binds)]
            words += [f"--machine={self._name}", f"--directory={self.root}", "--quiet"]
            with self.console.open("wb") as console:
                # The end of this script ends the machine, too.
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", "systemd-nspawn", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    env={"PATH": PATH, "NOTIFY_SOCKET": f"@{address[1:]}"},
                    preexec_fn=self._cgroup.enter if self._cgroup else None,  # noqa: PLW1509 - no threads here
                    start_new_session=True,
                )
            self._await_ready(notified)

    def _await_ready(self, notified: socket.socket) -> None:
        while True:
            try:
                message = notified.recv(4096).decode()
            except TimeoutError:
                raise Failed(f"the machine did not boot in {HANGS_S:g} s: see {self.console}") from None
            for line in message.splitlines():
                if line.startswith("X_NSPAWN_LEADER_PID="):
                    self._leader = int(line.partition("=")[2])
                if line == "READY=1":
                    return

    def start(self, script: str, *, user: str = "root") -> subprocess.Popen[str]:
        """Start a bash script in the machine. A user other than root gets a login session for the script."""
        script = PRELUDE + script
        inside = ["bash", "-c", script] if user == "root" else ["runuser", "--login", user, "--command", script]
        enter = ["nsenter", f"--target={self._leader}", *NAMESPACES, "--"]
        environment = ["env", "--ignore-environment", f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8"]
        return subprocess.Popen(
            [*enter, *environment, *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *, user: str = "root", status: int = 0) -> str:
        """Run a bash script in the machine and return its output. An exit status other than `status` raises Failed."""
        process = self.start(script, user=user)
        try:
            said, _ = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            raise Failed(f"$ {script}\n{said}\nis not over after {HANGS_S:g} s") from None
        except BaseException:  # this script ends, and nsenter would outlive the machine
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode != status:
            raise Failed(f"$ {script}\n{said}\nended with {process.returncode}, not {status}")
        return said.rstrip("\n")

    def journal(self, since_s: float) -> str:
        return self.run(f"journalctl --no-pager --quiet --no-hostname --since=@{since_s:.3f} | tail -n 60")

    def stop(self) -> None:
        """Shut the machine down, and kill it if it does not stop."""
        if self._process is None:
            return
        deadline_s = time.monotonic() + STOPPED_S
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # nspawn kills everything at the second SIGTERM
            self._process.send_signal(number)
            try:
                self._process.wait(max(1.0, deadline_s - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None
        if self._cgroup is not None:
            self._cgroup.remove()
