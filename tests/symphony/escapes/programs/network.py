"""Attacks by sockets: the network, the kernel's own families, and servers of this machine."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attack import Attack, World, attack

TIMEOUT_S = 2.0
INET, UNIX = socket.AF_INET, socket.AF_UNIX
STREAM, DGRAM, RAW = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW


def _greets(name: str, tries: str, family: int, where: Callable[[World], Any]) -> Attack:
    def run(world: World) -> str:
        with socket.socket(family) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(where(world))
            connection.sendall(b"hello")
            return connection.recv(200).decode()

    return Attack(name, tries, run)


MANY = [
    _greets("tcp", "Talks to a TCP server on 127.0.0.1", INET, lambda w: ("127.0.0.1", w["tcp"])),
    _greets("tcp6", "Talks to a TCP server on ::1", socket.AF_INET6, lambda w: ("::1", w["tcp6"])),
    _greets("abstract_socket", "Talks to an abstract Unix address", UNIX, lambda w: "\0" + w["abstract"]),
    _greets("docker_socket", "Talks to a pathname socket, as docker's is", UNIX, lambda w: w["docker"]),
]


@attack()
def other_families(_world: World) -> str | None:
    """Makes sockets of all families but Unix and the internet, and raw ones of that."""
    families = [family for family in range(3, 46) if family != socket.AF_INET6]
    kinds = [(family, kind, 0) for family in families for kind in (STREAM, DGRAM, socket.SOCK_SEQPACKET, RAW)]
    made = []
    for kind in (*kinds, (INET, RAW, socket.IPPROTO_ICMP)):
        with suppress(OSError):
            socket.socket(*kind).close()
            made.append(kind)
    return f"{made}" if made else None


@attack()
def abstract_names(world: World) -> str | None:
    """Reads from /proc which abstract addresses are in use."""
    return world["abstract"] if world["abstract"] in Path("/proc/self/net/unix").read_text() else None


@attack()
def environment(world: World) -> str | None:
    """Finds secrets and addresses of servers in its environment."""
    begun_with = Path("/proc/self/environ").read_text().split("\0")
    found = [each for each in (*begun_with, *os.environ.values()) if world["canary"] in each]
    return f"{found}" if found else None
