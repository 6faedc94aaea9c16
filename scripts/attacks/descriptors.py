#!/usr/bin/env python3
"""Descriptors whose last close takes as long as the attacker likes, sent to both sockets of a daemon.

TCP sockets with SO_LINGER and data that nobody reads. The daemon reads their packets, ends a connection with some
unread, and ends itself while connections wait to be accepted. The socket of programs refuses descriptors, if the
kernel can. That of launchers has to take them, as both have on older kernels.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import TimeoutExpired

from attacked import ATTACKER, Daemon, as_user, daemon, options, verdict

from libsym.channel.handshake import GREETING

HELD_UP_S = 5.0
SEND_S, HOLD_S = 4.0, 10.0
"""How long the attacker may take to send, and how long he lives then."""
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
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
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
            error = throw(connection)
        if door or not error:
            print("sent", flush=True)
        connection.close()
print("all sent", flush=True)
time.sleep(float(sys.argv[4]))  # with this process the other ends of what lingers would go
os._exit(0)
"""


@contextmanager
def attack(served: Daemon, num_packets: int) -> Iterator[threading.Thread]:
    """Send packets by both sockets; the attacker lives until `with` is over."""
    done = []
    arguments = (ATTACKER, ATTACK, served.socket, GREETING.hex(), num_packets, HOLD_S)
    attacker = threading.Thread(target=lambda: done.append(as_user(*arguments, served=served, timeout=60)))
    attacker.start()
    yield attacker
    attacker.join()
    assert "all sent" in done[0].stdout, done[0].stderr


def wait_s(served: Daemon) -> float:
    """How long `ls` and a program take."""
    began_s = time.monotonic()
    with suppress(TimeoutExpired):
        as_user(0, ["ls", served.mount])
        as_user(0, "sym.kv_create().close()", served=served)
    return time.monotonic() - began_s


def end_s(served: Daemon) -> float:
    """How long a daemon takes to end that has connections to accept."""
    served.process.send_signal(signal.SIGSTOP)
    with attack(served, 4):
        time.sleep(SEND_S)
        began_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGCONT)
        with suppress(TimeoutExpired):
            served.process.wait(HOLD_S)
        return time.monotonic() - began_s


def main() -> int:
    """Attack a daemon while it serves, and while it ends."""
    chosen = options(__doc__)
    broken = []
    with daemon(tree=chosen.tree) as served:
        with attack(served, 4 if chosen.quick else 100) as attacker:
            held_s = 0.0
            while attacker.is_alive():
                held_s = max(held_s, wait_s(served))
        if held_s > HELD_UP_S:
            broken.append(f"ls and a program took {held_s:.1f} s")
        if (held_s := end_s(served)) > HELD_UP_S:
            broken.append(f"the end took {held_s:.1f} s")
    return verdict("closing what others have sent holds up nobody", broken)


if __name__ == "__main__":
    sys.exit(main())
