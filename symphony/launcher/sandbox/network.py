"""The inside of `--allow-net`: `lo`, an address for each granted host, and a listener for each grant.

A socket belongs to the network namespace that it was made in. So the listeners go to the launcher, whose forwarder
accepts on them from outside and connects to the real host: no veth, no root, no variables that name a proxy.

Addresses are set by ioctl(2): it does all that is needed here, and AF_NETLINK more than a sandbox should.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence

from symphony.launcher.grants import LOCALHOST, Grant, inside_addresses, is_address, shown
from symphony.launcher.places import Refused

BACKLOG = 256
"""Connections that wait for the forwarder."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_IFF_UP = 1
_FLAGS = "16sh22x"
"""struct ifreq with a name and flags."""
_ADDRESS = "16sHH4s16x"
"""struct ifreq with a name and a sockaddr_in."""
_ADDRESS_6 = "16sIi"
"""struct in6_ifreq: address, length of its prefix, index of the interface."""
_ONE_HOST = socket.inet_aton("255.255.255.255")
_TENTATIVE_S = 5.0
"""A new IPv6 address can be bound when a kernel thread has looked at it, which takes a moment."""
_TENTATIVE_AGAIN_S = 0.0005


def open_grants(grants: Sequence[Grant]) -> tuple[str, list[socket.socket]]:
    """The text of the sandbox's /etc/hosts, and a listener for each grant, in their order; localhost has two.

    It is called in the new user and network namespaces, with their capabilities. Nobody inside may keep a listener.
    Refused: the kernel takes an address or a port not.
    """
    _raise_lo()
    addresses = inside_addresses(grants)
    localhost = tuple(address for address in LOCALHOST if _is_there(address))
    if "localhost" in addresses:
        addresses["localhost"] = localhost
    listening: dict[tuple[str, int], socket.socket] = {}
    added = set(LOCALHOST)
    try:
        for host, port in grants:
            for address in addresses[host]:
                if address not in added:
                    _add_address(address, len(added))
                    added.add(address)
                if (address, port) not in listening:
                    listening[address, port] = _listener(address, port)
    except OSError as error:
        for each in listening.values():
            each.close()
        raise Refused(f"{shown((host, port))} can't be granted at {address}: {error.strerror}") from None
    lines = [f"{address} localhost" for address in localhost]
    lines += [f"{addresses[host][0]} {host}" for host in addresses if host != "localhost" and not is_address(host)]
    return "\n".join([*lines, ""]), list(listening.values())


def _raise_lo() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        had = fcntl.ioctl(asking, _SIOCGIFFLAGS, struct.pack(_FLAGS, b"lo", 0))
        flags = struct.unpack(_FLAGS, had)[1] | _IFF_UP
        fcntl.ioctl(asking, _SIOCSIFFLAGS, struct.pack(_FLAGS, b"lo", flags))


def _is_there(address: str) -> bool:
    """Not where the machine has no IPv6: then localhost is 127.0.0.1 alone."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as asking:
            asking.bind((address, 0))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return False
    return True


def _add_address(address: str, number: int) -> None:
    """To `lo`, with no network around it. `number` is one that no other address has.

    Names get theirs in this way too, though all of 127.0.0.0/8 is there: glibc takes a machine with no address but
    127.0.0.1 for one without IPv4, and does not resolve names of IPv4 hosts for programs that set AI_ADDRCONFIG.
    """
    packed = ipaddress.ip_address(address).packed
    with socket.socket(_family(address), socket.SOCK_DGRAM) as asking:
        if asking.family == socket.AF_INET6:
            request = struct.pack(_ADDRESS_6, packed, 128, socket.if_nametoindex("lo"))
            fcntl.ioctl(asking, _SIOCSIFADDR, request)
            return
        alias = f"lo:{number}".encode()
        for what, value in ((_SIOCSIFADDR, packed), (_SIOCSIFNETMASK, _ONE_HOST)):
            fcntl.ioctl(asking, what, struct.pack(_ADDRESS, alias, socket.AF_INET, 0, value))


def _listener(address: str, port: int) -> socket.socket:
    listening = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        _bind(listening, address, port)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _bind(listening: socket.socket, address: str, port: int) -> None:
    until_s = time.monotonic() + _TENTATIVE_S
    while True:
        try:
            listening.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or time.monotonic() > until_s:
                raise
            time.sleep(_TENTATIVE_AGAIN_S)
        else:
            return


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
