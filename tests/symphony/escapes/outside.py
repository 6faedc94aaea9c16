"""Targets outside of a sandbox, made by a test: servers, files, a program with a secret, a terminal."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import shutil
import socket
import struct
import subprocess
import sys
import threading
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, IPC_CREAT, IPC_RMID = -100, 0o1000, 0

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
    nice, least = os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0))
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
        self._open_terminal()
        self._start_victim()
        self._start_tmux()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for each in self._threads:
            each.join(20)

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def writable(self) -> Path:
        return self.directory / "writable"

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

    def typed(self) -> bytes:
        """Return the bytes that were pushed into the user's terminal, or written on it, since the last call."""
        os.set_blocking(self._terminal, False)
        with suppress(BlockingIOError):
            return os.read(self._terminal, 1 << 16)
        return b""

    def _own(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)

    def _make_files(self) -> None:
        for path in (self.home / ".ssh", self.writable):
            path.mkdir(parents=True)
        key = self.home / ".ssh/id_rsa"
        self.secret.write_text(self.canary)
        key.write_text(self.canary)
        for path, mode in ((self.secret, 0o644), (key, 0o600), (self.home, 0o755), (self.home / ".ssh", 0o700)):
            self._own(path, mode)
        self._own(self.writable, 0o777)
        self.directory.chmod(0o755)
        self.world |= {
            "secret": str(self.secret),
            "home": str(self.home),
            "ssh": str(key),
            "writable": str(self.writable),
            "handle": _handle_of(self.secret),
            "disk": _device_of(self.secret),
        }

    def _serve(self, family: int, kind: int, address: Any) -> Any:
        """A server that answers with the canary; its address."""
        listening = self._stack.enter_context(socket.socket(family, kind))
        listening.bind(address)
        if kind == socket.SOCK_DGRAM:
            target = self._answer_packets
        else:
            listening.listen()
            target = self._answer_connections
        self._stack.callback(_wake, listening)
        thread = threading.Thread(target=target, args=(listening,), daemon=True)
        self._threads.append(thread)
        thread.start()
        if isinstance(address, str) and not address.startswith("\0"):
            self._own(Path(address), 0o666)
        return listening.getsockname()

    def _answer_connections(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(2)
                connection.recv(100)
                connection.sendall(self.canary.encode())

    def _answer_packets(self, listening: socket.socket) -> None:
        while True:
            try:
                raw, sender = listening.recvfrom(100)
            except OSError:
                return
            if not raw:
                return
            if sender:
                with suppress(OSError):
                    listening.sendto(self.canary.encode(), sender)

    def _serve_sockets(self, runtime: Path) -> None:
        abstract = f"abstract-{uuid.uuid4().hex}"
        stream, packets, inet = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_INET
        sockets = runtime / "sockets"
        sockets.mkdir()
        self._own(sockets, 0o755)
        self._serve(socket.AF_UNIX, stream, "\0" + abstract)
        self._serve(socket.AF_UNIX, stream, str(sockets / "docker.sock"))
        self._serve(socket.AF_UNIX, stream, str(runtime / "bus"))
        self._serve(socket.AF_UNIX, packets, str(sockets / "log"))
        self.world |= {
            "tcp": self._serve(inet, stream, ("127.0.0.1", 0))[1],
            "tcp6": self._serve(socket.AF_INET6, stream, ("::1", 0))[1],
            "tcp_anywhere": self._serve(inet, stream, ("0.0.0.0", 0))[1],
            "udp": self._serve(inet, packets, ("0.0.0.0", 0))[1],
            "address": _own_address(),
            "abstract": abstract,
            "docker": str(sockets / "docker.sock"),
            "bus": str(runtime / "bus"),
            "datagrams": str(sockets / "log"),
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
        queue = f"/{self.canary}".encode()
        one_of_16_bytes = struct.pack("8q", 0, 1, 16, 0, *[0] * 4)  # a user's default ones are few: RLIMIT_MSGQUEUE
        made = LIBC.syscall(240, queue[1:], os.O_RDWR | os.O_CREAT, 0o666, one_of_16_bytes)
        assert made >= 0, f"no POSIX message queues: {os.strerror(ctypes.get_errno())}"
        os.close(made)
        self._stack.callback(LIBC.syscall, 241, queue[1:])
        self.world |= {"shm_key": key, "dev_shm": str(posix), "queue": queue[1:].decode()}

    def _open_terminal(self) -> None:
        """Open a terminal from which the user could have started the program. A shell would read its keys."""
        self._terminal, theirs = pty.openpty()
        self._stack.callback(os.close, self._terminal)
        self._stack.callback(os.close, theirs)
        name = Path(os.ttyname(theirs))
        self._own(name, 0o620)
        self.world |= {"terminal": str(name), "typed": "x"}

    def _start_victim(self) -> None:
        """A program of the same user."""
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

    def _start_tmux(self) -> None:
        tmux = shutil.which("tmux")
        if tmux is None:
            return
        path = self.world["runtime"] + "/sockets/tmux"
        socket_options = [tmux, "-f", os.devnull, "-S", path]
        environment = {"HOME": str(self.home), "PATH": os.defpath, "LANG": "C.UTF-8", "SHELL": "/bin/sh"}
        how: dict[str, Any] = {"env": environment, "cwd": "/", **as_user(self.uid)}
        (Path(path).parent).chmod(0o777)
        subprocess.run([*socket_options, "new-session", "-d", "cat"], check=True, **how)
        self._stack.callback(lambda: subprocess.run([*socket_options, "kill-server"], check=True, **how))
        self.world["tmux"] = path


def as_user(uid: int) -> dict[str, Any]:
    """Return the arguments with which subprocess starts a command as a user."""
    return {"user": uid, "group": uid, "extra_groups": []} if uid != os.getuid() else {}


def _wake(listening: socket.socket) -> None:
    """Ends the thread that waits there."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _handle_of(path: Path) -> tuple[int, str]:
    """Return the argument of open_by_handle_at(2): the handle's kind, and its bytes in hexadecimal digits."""
    room = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0), 136)
    mount = ctypes.c_int()
    if LIBC.syscall(303, AT_FDCWD, os.fsencode(path), room, ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), "no handle")
    size, kind = struct.unpack_from("<Ii", room.raw)
    return kind, room.raw[8 : 8 + size].hex()


def _device_of(path: Path) -> str:
    """The disk that it lies on, if it lies on one."""
    number = path.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return f"/dev/{link.resolve().name}" if link.exists() else "/dev/none"


def _own_address() -> str:
    """Return an address of this machine that is not its usual loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(asking.getsockname()[0])
