"""Targets outside of a sandbox, made by a test: servers, files, memory, a program with a secret."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
IPC_CREAT, IPC_RMID = 0o1000, 0

VICTIM = """
import ctypes, json, os, signal, sys
secret = ctypes.create_string_buffer(os.environ["CANARY"].encode())
file = open(sys.argv[1])
count = 0
def told(*_):
    global count
    count += 1
signal.signal(signal.SIGUSR1, told)
print(json.dumps({"address": ctypes.addressof(secret), "fd": file.fileno()}), flush=True)
for line in sys.stdin:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    print(json.dumps({"signals": count, "secret": secret.value.decode(), "nice": nice}), flush=True)
"""


class Outside:
    """Targets of one user; `world` tells attackers where they are."""

    def __init__(self, directory: Path, uid: int, runtime: Path) -> None:
        """`runtime`: the user's runtime directory, short and there already."""
        self.uid = uid
        self.canary = f"canary-{uuid.uuid4().hex}"
        self.directory = directory
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self.world: dict[str, Any] = {
            "canary": self.canary,
            "runtime": str(runtime),
            "mark": f"victim-of-{self.canary}",
        }
        directory.mkdir()
        self._make_files()
        self._serve_sockets(runtime)
        self._share_memory()
        self._start_victim()

    def close(self) -> None:
        self._stack.close()
        for each in self._threads:
            each.join(20)

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def secret(self) -> Path:
        return self.directory / "secret"

    def victim(self) -> dict[str, Any]:
        """Return the victim's present state: the signals that it got, its secret, its priority."""
        stdin, stdout = self._victim.stdin, self._victim.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline())
        return found

    def _own(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)

    def _make_files(self) -> None:
        writable = self.directory / "writable"
        for path in (self.home / ".ssh", writable):
            path.mkdir(parents=True)
        key = self.home / ".ssh/id_rsa"
        self.secret.write_text(self.canary)
        key.write_text(self.canary)
        for path, mode in ((self.secret, 0o644), (key, 0o600), (self.home, 0o755), (self.home / ".ssh", 0o700)):
            self._own(path, mode)
        self._own(writable, 0o777)
        self.directory.chmod(0o755)
        self.world |= {"secret": str(self.secret), "home": str(self.home), "ssh": str(key), "writable": str(writable)}

    def _serve(self, family: int, address: Any) -> Any:
        """A server that answers with the canary; its address."""
        listening = self._stack.enter_context(socket.socket(family))
        listening.bind(address)
        listening.listen()
        self._stack.callback(_wake, listening)
        thread = threading.Thread(target=self._answer, args=(listening,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return listening.getsockname()

    def _answer(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(2)
                connection.recv(100)
                connection.sendall(self.canary.encode())

    def _serve_sockets(self, runtime: Path) -> None:
        abstract = f"abstract-{uuid.uuid4().hex}"
        sockets = runtime / "sockets"
        sockets.mkdir()
        self._own(sockets, 0o755)
        self._serve(socket.AF_UNIX, "\0" + abstract)
        self._serve(socket.AF_UNIX, docker := str(sockets / "docker.sock"))
        self._own(Path(docker), 0o666)
        self.world |= {
            "tcp": self._serve(socket.AF_INET, ("127.0.0.1", 0))[1],
            "tcp6": self._serve(socket.AF_INET6, ("::1", 0))[1],
            "abstract": abstract,
            "docker": docker,
        }

    def _share_memory(self) -> None:
        key = uuid.uuid4().int & 0x7FFFFFFF
        number = LIBC.shmget(key, 4096, IPC_CREAT | 0o666)
        assert number >= 0, "no System V shared memory"
        self._stack.callback(LIBC.shmctl, number, IPC_RMID, None)
        LIBC.shmat.restype = ctypes.c_void_p
        address = LIBC.shmat(number, None, 0)
        ctypes.memmove(address, self.canary.encode(), len(self.canary))
        LIBC.shmdt(ctypes.c_void_p(address))
        posix = Path(f"/dev/shm/{self.canary}")
        posix.write_text(self.canary)
        self._stack.callback(posix.unlink)
        self.world |= {"shm_key": key, "dev_shm": str(posix)}

    def _start_victim(self) -> None:
        self._victim = self._stack.enter_context(
            subprocess.Popen(
                ["/usr/bin/python3" if self.uid else sys.executable, "-c", VICTIM, self.secret, self.world["mark"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.home,
                env={"CANARY": self.canary},
                **as_user(self.uid),
            )
        )
        self._stack.callback(self._victim.kill)
        assert self._victim.stdout is not None
        found = json.loads(self._victim.stdout.readline())
        self.world |= {"victim": self._victim.pid, "victim_address": found["address"], "victim_fd": found["fd"]}


def as_user(uid: int) -> dict[str, Any]:
    """Return the arguments with which subprocess starts a command as a user."""
    return {"user": uid, "group": uid, "extra_groups": []} if uid != os.getuid() else {}


def _wake(listening: socket.socket) -> None:
    """Ends the thread that waits there."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
