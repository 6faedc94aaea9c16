"""Attacks by sockets: the network, the kernel's own families, and servers of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attack import Attack, Refused, World, attack

TIMEOUT_S = 2.0
INET, UNIX, NETLINK = socket.AF_INET, socket.AF_UNIX, socket.AF_NETLINK
STREAM, DGRAM, RAW, SEQPACKET = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET


def _greets(name: str, tries: str, family: int, kind: int, where: Callable[[World], Any]) -> Attack:
    def run(world: World) -> str:
        with socket.socket(family, kind) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(where(world))
            connection.sendall(b"hello")
            return connection.recv(200).decode()

    return Attack(name, tries, run)


def _makes(name: str, tries: str, *what: int) -> Attack:
    def run(_world: World) -> str:
        with socket.socket(*what) as made:
            return f"{made}"

    return Attack(name, tries, run)


MANY = [
    _greets("tcp", "Talks to a TCP server on 127.0.0.1", INET, STREAM, lambda w: ("127.0.0.1", w["tcp"])),
    _greets("tcp6", "Talks to a TCP server on ::1", socket.AF_INET6, STREAM, lambda w: ("::1", w["tcp6"])),
    _greets("tcp_by_address", "The same, not by loopback", INET, STREAM, lambda w: (w["address"], w["tcp_anywhere"])),
    _greets("udp", "Sends a UDP packet to 127.0.0.1", INET, DGRAM, lambda w: ("127.0.0.1", w["udp"])),
    _greets("udp_by_address", "The same, not by loopback", INET, DGRAM, lambda w: (w["address"], w["udp"])),
    _greets("abstract_socket", "Talks to an abstract Unix address", UNIX, STREAM, lambda w: "\0" + w["abstract"]),
    _greets("docker_socket", "Talks to a pathname socket, as docker's is", UNIX, STREAM, lambda w: w["docker"]),
    _greets("user_bus", "Talks to the user's runtime directory, as of D-Bus", UNIX, STREAM, lambda w: w["bus"]),
    _makes("raw_icmp", "Makes a raw IP socket", INET, RAW, socket.IPPROTO_ICMP),
    _makes("packet", "Makes a socket that sees all packets", socket.AF_PACKET, RAW, socket.htons(3)),
    _makes("vsock", "Makes a socket to the machine that this one runs on", 40, STREAM),
]


@attack()
def tcp_fastopen(world: World) -> str:
    """Sends data to a TCP server with the connection itself."""
    with socket.socket(INET, STREAM) as connection:
        connection.sendto(b"hello", socket.MSG_FASTOPEN, ("127.0.0.1", world["tcp"]))
        return connection.recv(200).decode()


@attack()
def netlink_route(_world: World) -> str:
    """Asks the kernel for the network interfaces by netlink."""
    with socket.socket(NETLINK, RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.send(struct.pack("=LHHLLBxHiLL", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))
        names = re.findall(rb"\x03\x00([a-z0-9]+)\x00", asking.recv(65536))
    return f"interfaces: {b' '.join(names).decode()}"


def _made(kinds: Iterable[tuple[int, ...]]) -> str:
    """Make sockets of all these; the ones that could be made, or the last refusal."""
    made = []
    for kind in kinds:
        try:
            socket.socket(*kind).close()
            made.append(kind)
        except OSError as error:
            refusal = error
    if not made:
        raise refusal
    return f"{made}"


@attack()
def netlink_audit(_world: World) -> str:
    """Opens the netlink sockets of the kernel's other parts."""
    return _made((NETLINK, RAW, each) for each in (4, 6, 9, 12, 15, 16))  # sock_diag, xfrm, audit, …, generic


@attack()
def other_families(_world: World) -> str:
    """Makes sockets of all families but Unix and the internet."""
    families = [family for family in range(3, 46) if family != socket.AF_INET6]
    return _made((family, kind) for family in families for kind in (STREAM, DGRAM, SEQPACKET, RAW))


@attack()
def crypto(_world: World) -> str:
    """Has the kernel compute a hash by AF_ALG."""
    with socket.socket(socket.AF_ALG, SEQPACKET) as hashing:
        hashing.bind(("hash", "sha256"))
        asking, _ = hashing.accept()
        with asking:
            asking.sendall(b"text")
            return f"sha256 {asking.recv(32).hex()[:8]}"


@attack()
def abstract_names(world: World) -> str | None:
    """Reads from /proc which abstract addresses are in use."""
    return world["abstract"] if world["abstract"] in Path("/proc/self/net/unix").read_text() else None


@attack()
def datagram_socket(world: World) -> str:
    """Sends a packet to a pathname socket, as syslog's and systemd's are."""
    with socket.socket(UNIX, DGRAM) as sending:
        return f"sent {sending.sendto(b'hello', world['datagrams'])} bytes"


@attack(no_control="a machine need not have one of these")
def system_sockets(_world: World) -> str | None:
    """Connects to the machine's own: D-Bus, systemd, docker, containerd, X11, ssh-agent."""
    uid = os.getuid()
    paths = ["/run/dbus/system_bus_socket", "/run/systemd/private", "/run/systemd/notify", "/run/docker.sock"]
    paths += ["/var/run/docker.sock", "/run/containerd/containerd.sock", f"/run/user/{uid}/bus", "/dev/log"]
    paths += [f"/run/user/{uid}/systemd/private", f"/tmp/tmux-{uid}/default", "/tmp/.X11-unix/X0"]
    paths += [os.environ[name] for name in ("SSH_AUTH_SOCK", "WAYLAND_DISPLAY") if name in os.environ]
    reached = [path for path in paths for kind in (STREAM, SEQPACKET, DGRAM) if _connects(path, kind)]
    return f"{reached}" if reached else None


def _connects(path: str, kind: int) -> bool:
    with socket.socket(UNIX, kind) as connection:
        connection.settimeout(TIMEOUT_S)
        return connection.connect_ex(path) == 0


@attack()
def tmux_server(world: World) -> str:
    """Has a tmux server of the user run a command outside."""
    if "tmux" not in world:
        raise Refused("no tmux here")
    tmux, mark = shutil.which("tmux") or "/usr/bin/tmux", Path(world["writable"]) / "by-tmux"
    command = [tmux, "-S", world["tmux"], "run-shell", f"cat {world['secret']} | tee {mark}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=5)
    if done.returncode != 0:
        raise Refused(done.stderr.strip()[-80:])
    return f"tmux ran a command: {done.stdout.strip() or 'no output'}"


@attack()
def environment(world: World) -> str | None:
    """Finds secrets and addresses of servers in its environment."""
    begun_with = Path("/proc/self/environ").read_text().split("\0")
    found = [each for each in (*begun_with, *os.environ.values()) if world["canary"] in each]
    return f"{found}" if found else None
