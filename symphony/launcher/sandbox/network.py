"""Sandbox's side of `--allow-net`: an address on `lo` for each granted host, and a listener for each grant.

A socket belongs to the network namespace in which it was made. So the sandbox sends its listeners to the launcher,
whose forwarder accepts their connections outside, and connects to the real hosts. This method needs no veth, no root,
and no variables for proxies.

Addresses are set by ioctl(2), which is sufficient here. AF_NETLINK could do more than a sandbox should.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence

from symphony.launcher.common.grants import LOCALHOST, Grant, inside_addresses, is_address, shown
from symphony.launcher.common.places import Refused

BACKLOG = 256
"""Upper bound of the connections of one listener that wait for the forwarder."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_IFF_UP = 1
_FLAGS = "16sh22x"
"""Format of a struct ifreq with a name and flags."""
_ADDRESS = "16sHH4s16x"
"""Format of a struct ifreq with a name and a sockaddr_in."""
_ADDRESS_6 = "16sIi"
"""Format of a struct in6_ifreq: address, length of its prefix, index of the interface."""
_ONE_HOST = socket.inet_aton("255.255.255.255")
_TENTATIVE_S = 5.0
"""Time limit for a new IPv6 address to become usable. A kernel thread checks it first."""
_TENTATIVE_AGAIN_S = 0.0005


def open_grants(grants: Sequence[Grant]) -> tuple[str, list[socket.socket]]:
    """Return the text of the sandbox's /etc/hosts, and a listener for each grant, in order. localhost has two
    listeners.

    The caller must be in the new user and network namespaces, with their capabilities. No process inside may keep a
    listener. Refused: the kernel refuses an address or a port.
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
    """Return whether an address of localhost can be bound. On a machine without IPv6, ::1 can't be bound."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as asking:
            asking.bind((address, 0))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return False
    return True


def _add_address(address: str, number: int) -> None:
    """Add an address to `lo`, as the only address of its network. `number`: a serial number that no other address has.

    Hosts given by name have addresses in 127.0.0.0/8. These could be bound without being added. But if the only address
    of a machine is 127.0.0.1, glibc assumes that the machine has no IPv4. Then glibc does not resolve names of IPv4
    hosts for programs that set AI_ADDRCONFIG.
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
