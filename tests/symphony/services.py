"""A service as a service manager has it: the mount helper with root's rights, and a daemon that has none."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

from tests.symphony.daemons import SYMPHONY, Daemon

SERVICE_UID, OTHER_UID = 12370, 12371
AS_SERVICE = Path(__file__).with_name("as_service.py")
ROOT = Path(__file__).resolve().parents[2]


def as_user(uid: int, source: str) -> str:
    """A LIP of another user."""
    return f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n{textwrap.dedent(source)}"


class Helper:
    """A mount helper, with the socket that it is handed."""

    def __init__(self, directory: Path, *mounts: Path) -> None:
        self.path = directory / "mount.sock"
        self.log = directory / "helper.log"
        self._mounts = mounts
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listening.bind(str(self.path))
        self.path.chmod(0o666)  # who may ask is the helper's own affair here
        self.listening.listen(16)
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        words = [sys.executable, "-m", "symphony.service.mount_helper", "--for", str(SERVICE_UID)]
        as_unit = (
            f"import os, sys; os.dup2({self.listening.fileno()}, 3); os.environ['LISTEN_PID'] = str(os.getpid()); "
        )
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", as_unit + "os.execv(sys.argv[1], sys.argv[1:])", *words, *self._mounts],
                pass_fds=[self.listening.fileno()],
                stderr=log,
                env={**os.environ, "LISTEN_FDS": "1", "PYTHONPATH": str(ROOT)},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = self._start()

    def close(self) -> None:
        self.kill()
        self.listening.close()


class Manager:
    """Stand-in for a service manager, which receives the daemon's notifications."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="sm")
        Path(self._directory.name).chmod(0o755)
        self.path = Path(self._directory.name) / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self.path.chmod(0o666)

    def next(self, timeout_s: float = 60) -> dict[str, str]:
        """Return the next message. TimeoutError: none came."""
        self._socket.settimeout(timeout_s)
        return dict(line.split("=", 1) for line in self._socket.recv(8192).decode().splitlines())

    def until(self, name: str) -> dict[str, str]:
        """The next word that has this in it."""
        while name not in (said := self.next()):
            pass
        return said

    def close(self) -> None:
        self._socket.close()
        self._directory.cleanup()


def start_service(directory: Path, helper: Helper, *options: str, **environment: str) -> Daemon:
    """A daemon without rights, over a helper; ready."""
    directory.chmod(0o755)
    with suppress(FileExistsError):  # and what is there may be a stale mount
        (directory / "kv").mkdir()
    state = directory / "state"
    state.mkdir(exist_ok=True)
    os.chown(state, SERVICE_UID, SERVICE_UID)
    command = [sys.executable, str(AS_SERVICE), str(SERVICE_UID), str(directory / "symphony.sock"), *SYMPHONY]
    words = ("--model", "tiny", "--kv-memory", "64M", "--mount-helper", str(helper.path), *options)
    variables = {"HOME": "/", "PYTHONPATH": str(ROOT), **environment}
    return Daemon(directory, *words, command=command, environment=variables)
