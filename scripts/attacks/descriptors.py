#!/usr/bin/env python3
"""Descriptors whose last close blocks as long as the attacker likes, sent to both sockets of a daemon.

The descriptors are TCP sockets with SO_LINGER and unread data. The daemon gets them in three ways: it reads packets
that carry descriptors, it closes a connection with unread packets, and it ends while connections wait to be accepted.
The programs' socket refuses descriptors if the kernel can. The launchers' socket has to accept them. On older kernels
both sockets have to accept descriptors.

A launcher also sends a file of a FUSE server that hangs. A process that closes such a file cannot even be killed.

A program in a sandbox sends the same sockets to its launcher, too, and clears O_NONBLOCK of all its descriptors.
Without a daemon the launcher itself closes the connections it accepts, and must still serve its other programs.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import TimeoutExpired

from attacked import ATTACKER, ROOT, Daemon, as_user, daemon, of_root, options, running_as, verdict

from libsym.channel.handshake import GREETING

sys.path.insert(0, str(ROOT))
from tests.scheduler.weapons import HungMount

HELD_UP_S = 15.0
GIVE_UP_S = 20.0
"""Time until a hang is certain. A busy machine takes some seconds for a command, and the sockets linger for 60."""
ATTACK = """
import json, signal, socket, struct, threading
path, greeting, num_packets = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
listening.bind(("127.0.0.1", 0))
listening.listen(1024)

def weapon():
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    made.connect(listening.getsockname())
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    made.setblocking(False)
    try:
        while True:
            made.send(bytes(1 << 16))
    except BlockingIOError:
        return made

kept = []
def throw(connection):
    made = weapon()
    try:
        socket.send_fds(connection, [b"x"], [made.fileno()], socket.MSG_DONTWAIT)
        made.close()
    except OSError as error:
        kept.append(made)
        return error

begins = {"": (b"", greeting), ".programs": (b"", b"no request")}
for door, kind in (("", socket.SOCK_STREAM), (".programs", socket.SOCK_SEQPACKET)):
    for number in range(num_packets):
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect(path + door)
        if begin := begins[door][number % 2]:
            connection.send(begin)
        for _ in range(2):
            throw(connection)
        connection.close()
print("all sent", flush=True)
sys.stdin.read()  # the end of this process would close the other ends of the lingering sockets
os._exit(0)
"""
SEND_FILE = """
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1] + ".programs")
socket.send_fds(connection, [b"x"], [os.open(sys.argv[2], os.O_RDONLY)])
sys.stdin.read()
"""
TO_LAUNCHER = """
import fcntl, os, socket, struct, sys, time

for number in range(64):
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except OSError:
        pass
weapons = []
for _ in range(3):
    made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    made.settimeout(0.3)
    try:
        while True:  # the launcher passes the bytes on, until the host takes no more
            made.send(bytes(1 << 16))
    except TimeoutError:
        weapons.append(made)
print("armed", flush=True)
sys.stdin.readline()
def throw(made):
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ["SYMPHONY_SOCKET"])
            try:
                socket.send_fds(connection, [b"x"], [made.fileno()])
            except BrokenPipeError:  # the launcher was faster
                continue
        os.close(made.detach())
        return

for made in weapons:
    try:
        throw(made)
    except PermissionError:
        break  # a close by this program would be the last one, and would linger
print("sent", flush=True)
time.sleep(600)
"""


@contextmanager
def attack(served: Daemon, num_packets: int) -> Iterator[None]:
    """Send packets to both sockets. The attacker lives until the block ends."""
    arguments = (served.socket, GREETING.hex(), num_packets)
    with running_as(ATTACKER, ATTACK, *arguments, served=served) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "all sent\n"
        yield


def wait_s(served: Daemon) -> float:
    """Return how long `ls` and a program take, in seconds."""
    began_s = time.monotonic()
    with suppress(TimeoutExpired):
        as_user(0, ["ls", served.mount])
        as_user(0, "sym.kv_create().close()", served=served)
    return time.monotonic() - began_s


@contextmanager
def hung_file(served: Daemon) -> Iterator[None]:
    """Send a file of a hung FUSE mount to the launchers' socket. The file stays open until the daemon has ended."""
    where = served.state.parent / "hung"
    where.mkdir(mode=0o755)
    mount = HungMount(where)
    # Another process opens the file. Otherwise children of this process would inherit the file, close it and hang.
    with running_as(0, SEND_FILE, served.socket, where / "file", served=served):
        try:
            until_s = time.monotonic() + GIVE_UP_S
            while not mount.num_hung() and time.monotonic() < until_s:
                time.sleep(0.05)
            yield
        finally:
            mount.let_go()


def end_s(served: Daemon) -> float:
    """Return how long a daemon takes to end while connections wait to be accepted, in seconds."""
    served.process.send_signal(signal.SIGSTOP)
    with attack(served, 4):
        began_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGCONT)
        with suppress(TimeoutExpired):
            served.process.wait(GIVE_UP_S)
        return time.monotonic() - began_s


def launcher_s(served: Daemon, tree: Path, port: int) -> tuple[float, float]:
    """Return how long the daemon takes to end, and then how long root's launcher takes to pass on a signal, while one
    of the launcher's programs attacks.
    """
    programs = served.state.parent / "programs"
    programs.mkdir()
    (programs / "attack.py").write_text(TO_LAUNCHER)
    (programs / "other.py").write_text("import time\ntime.sleep(600)\n")
    subprocess.run(**of_root(served, tree, "run", "--detach", programs / "other.py"), check=True, capture_output=True)
    command = of_root(served, tree, "run", "--allow-net", f"127.0.0.1:{port}", programs / "attack.py", port)
    with subprocess.Popen(**command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "armed\n"
        with hung_file(served):
            took_s = end_s(served)
        attacker.stdin.write("\n")  # without a daemon, the launcher closes the connections that it accepts
        attacker.stdin.flush()
        assert attacker.stdout.readline() == "sent\n"
        began_s = time.monotonic()
        with suppress(TimeoutExpired):
            kill = of_root(served, tree, "kill", "other")
            subprocess.run(**kill, check=True, capture_output=True, timeout=GIVE_UP_S)
        attacker.kill()
        return took_s, time.monotonic() - began_s


def main() -> int:
    """Attack a daemon while it serves and while it ends, and then the launcher after the daemon's end."""
    chosen = options(__doc__)
    broken = []
    with daemon(tree=chosen.tree) as served, socket.socket() as host:  # the host never reads
        host.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        host.bind(("127.0.0.1", 0))
        host.listen()
        with attack(served, 4 if chosen.quick else 100):
            held_s = wait_s(served)
        if held_s > HELD_UP_S:
            broken.append(f"ls and a program took {held_s:.1f} s")
        ended_s, signalled_s = launcher_s(served, chosen.tree, host.getsockname()[1])
        if ended_s > HELD_UP_S:
            broken.append(f"the end took {ended_s:.1f} s")
        if signalled_s > HELD_UP_S:
            broken.append(f"a signal took {signalled_s:.1f} s after another program's attack")
    return verdict("closing descriptors that an attacker sent delays no other call", broken)


if __name__ == "__main__":
    sys.exit(main())
