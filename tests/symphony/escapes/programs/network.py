"""Attacks by sockets: the network, the kernel's own families, and servers of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from attack import Refused, World, attack

TIMEOUT_S = 2.0


def _greeting(family: int, kind: int, address: Any) -> str:
    with socket.socket(family, kind) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(address)
        connection.sendall(b"hello")
        return connection.recv(200).decode()


@attack()
def tcp(world: World) -> str:
    """Talks to a TCP server on 127.0.0.1."""
    return _greeting(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", world["tcp"]))


@attack()
def tcp6(world: World) -> str:
    """Talks to a TCP server on ::1."""
    return _greeting(socket.AF_INET6, socket.SOCK_STREAM, ("::1", world["tcp6"]))


@attack()
def tcp_by_address(world: World) -> str:
    """Talks to a TCP server by an address of this machine that is not loopback."""
    return _greeting(socket.AF_INET, socket.SOCK_STREAM, (world["address"], world["tcp_anywhere"]))


@attack()
def tcp_fastopen(world: World) -> str:
    """Sends data to a TCP server with the connection itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.sendto(b"hello", socket.MSG_FASTOPEN, ("127.0.0.1", world["tcp"]))
        return connection.recv(200).decode()


@attack()
def udp(world: World) -> str:
    """Sends a UDP packet to 127.0.0.1 and reads the answer."""
    return _greeting(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", world["udp"]))


@attack()
def udp_by_address(world: World) -> str:
    """Sends a UDP packet to an address of this machine that is not loopback."""
    return _greeting(socket.AF_INET, socket.SOCK_DGRAM, (world["address"], world["udp"]))


@attack()
def raw_icmp(_world: World) -> str:
    """Makes a raw IP socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP):
        return "a raw socket"


@attack()
def packet(_world: World) -> str:
    """Makes a socket that sees all packets."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as listening:
        return f"a packet socket {listening.getsockname()}"


@attack()
def netlink_route(_world: World) -> str:
    """Asks the kernel for the network interfaces by netlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.send(struct.pack("=LHHLLBxHiLL", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))
        names = re.findall(rb"\x03\x00([a-z0-9]+)\x00", asking.recv(65536))
    return f"interfaces: {b' '.join(names).decode()}"


@attack()
def netlink_audit(_world: World) -> str:
    """Opens the netlink sockets of the kernel's other parts."""
    made = []
    for protocol in (4, 6, 9, 12, 15, 16):  # sock_diag, xfrm, audit, netfilter, uevents, generic
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol):
                made.append(protocol)
        except OSError as error:
            refusal = error
    if not made:
        raise refusal
    return f"netlink protocols {made}"


@attack()
def other_families(_world: World) -> str:
    """Makes sockets of all families but Unix and the internet."""
    made = []
    for family in range(3, 46):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            try:
                socket.socket(family, kind).close()
            except OSError as error:
                refusal = error
                continue
            if family != socket.AF_INET6:
                made.append(family)
                break
    if not made:
        raise refusal
    return f"families {made}"


@attack()
def crypto(_world: World) -> str:
    """Has the kernel compute a hash by AF_ALG."""
    with socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) as hashing:
        hashing.bind(("hash", "sha256"))
        asking, _ = hashing.accept()
        with asking:
            asking.sendall(b"text")
            return f"sha256 {asking.recv(32).hex()[:8]}"


@attack()
def vsock(_world: World) -> str:
    """Makes a socket to the machine that this one runs on."""
    with socket.socket(40, socket.SOCK_STREAM):
        return "a socket to the host"


@attack()
def abstract_socket(world: World) -> str:
    """Talks to a server at an abstract Unix address."""
    return _greeting(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + world["abstract"])


@attack()
def abstract_names(world: World) -> str | None:
    """Reads from /proc which abstract addresses are in use."""
    return world["abstract"] if world["abstract"] in Path("/proc/self/net/unix").read_text() else None


def _connects(path: str) -> str:
    last: OSError | None = None
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        try:
            with socket.socket(socket.AF_UNIX, kind) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(path)
                return f"connected to {Path(path).name}"
        except OSError as error:
            last = error
    assert last is not None
    raise last


@attack()
def docker_socket(world: World) -> str:
    """Talks to the server at a pathname socket, as docker's is."""
    return _greeting(socket.AF_UNIX, socket.SOCK_STREAM, world["docker"])


@attack()
def user_bus(world: World) -> str:
    """Talks to the server in the user's runtime directory, as D-Bus and systemd --user are."""
    return _greeting(socket.AF_UNIX, socket.SOCK_STREAM, world["bus"])


@attack()
def datagram_socket(world: World) -> str:
    """Sends a packet to a pathname socket, as syslog's and systemd's are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        return f"sent {sending.sendto(b'hello', world['datagrams'])} bytes"


@attack(no_control="a machine need not have one of these")
def system_sockets(world: World) -> str | None:
    """Connects to the machine's own: D-Bus, systemd, docker, containerd, X11, ssh-agent."""
    uid = os.getuid()
    paths = ["/run/dbus/system_bus_socket", "/run/systemd/private", "/run/systemd/notify", "/run/docker.sock"]
    paths += ["/var/run/docker.sock", "/run/containerd/containerd.sock", f"/run/user/{uid}/bus", "/dev/log"]
    paths += [f"/run/user/{uid}/systemd/private", f"/tmp/tmux-{uid}/default", "/tmp/.X11-unix/X0"]
    paths += [os.environ[name] for name in ("SSH_AUTH_SOCK", "WAYLAND_DISPLAY") if name in os.environ]
    reached = []
    for path in paths:
        try:
            reached.append(_connects(path))
        except OSError:
            continue
    return f"{reached}" if reached else None


@attack()
def tmux_server(world: World) -> str:
    """Has a tmux server of the user run a command outside."""
    if "tmux" not in world:
        raise Refused("no tmux here")
    mark = Path(world["writable"]) / "by-tmux"
    tmux = shutil.which("tmux") or "/usr/bin/tmux"
    done = subprocess.run(
        [tmux, "-S", world["tmux"], "run-shell", f"cat {world['secret']} | tee {mark}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=5,
    )
    if done.returncode != 0:
        raise Refused(done.stderr.strip()[-80:])
    return f"tmux ran a command: {done.stdout.strip() or 'no output'}"


@attack()
def environment(world: World) -> str | None:
    """Finds secrets and addresses of servers in its environment."""
    begun_with = Path("/proc/self/environ").read_text().split("\0")
    found = [each for each in (*begun_with, *os.environ.values()) if world["canary"] in each]
    return f"{found}" if found else None
