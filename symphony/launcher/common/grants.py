"""Grants: each lets a sandboxed program connect to one port of one host, given as HOST:PORT.

A host is a name, an IPv4 address, or an IPv6 address in brackets. A sandbox has only the interface `lo`, so each host
gets an address there. An IP address is added to `lo` as it is, a name gets an address 127.77.x.y, and localhost has its
usual addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from symphony.launcher.common.places import Refused

Grant = tuple[str, int]
"""A host, normalized by `checked_grant` and without brackets, and a TCP port."""

MAX_GRANTS = 64
LOCALHOST = ("127.0.0.1", "::1")
"""Addresses that the kernel gives to `lo`."""
_NAMES = ipaddress.ip_network("127.77.0.0/16")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""Pattern of a name's last label. If the label matches, resolvers parse the name as an address, as in 127.1."""
_MAX_NAME = 253
_MAX_PORT = 65535
_HOW = "give HOST:PORT, such as example.com:443 or [2001:db8::1]:80"


def parse_grant(text: str) -> Grant:
    """Parse `HOST:PORT` or `[IPv6]:PORT`. Refused: the text is not a grant."""
    host, colon, port = text.rpartition(":")
    if not colon or host.endswith(":") or (host.startswith("[") and not host.endswith("]")):
        raise Refused(f"{text!r} names no port: {_HOW}")
    if not (port.isascii() and port.isdigit()):
        raise Refused(f"{text!r} has no number for a port: {_HOW}")
    if host.startswith("["):
        host = host[1:-1]
        if ":" not in host:
            raise Refused(f"{text!r} has no IPv6 address in its brackets: {_HOW}")
    elif ":" in host:
        raise Refused(f"{text!r} is not clear: an IPv6 address goes in brackets, and a URL is no host: {_HOW}")
    return checked_grant(host, int(port))


def checked_grants(given: Iterable[tuple[str, int]]) -> list[Grant]:
    """Check grants from a message, and drop duplicates. Refused: a grant is invalid, or there are too many."""
    grants = list(dict.fromkeys(checked_grant(host, port) for host, port in given))
    if len(grants) > MAX_GRANTS:
        raise Refused(f"{len(grants)} grants of the network: a program can have {MAX_GRANTS}")
    return grants


def checked_grant(host: str, port: int) -> Grant:
    """Return a grant with its host normalized: a name in lowercase without a final dot, an address in its short form.
    Refused: the host or the port can't be granted.
    """
    if not 0 < port <= _MAX_PORT:
        raise Refused(f"the port of {host!r} is {port}: it has to be from 1 to {_MAX_PORT}")
    if "*" in host or not host:
        raise Refused(f"{host!r} is no single host: {_HOW}, once for each")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _checked_name(host), port
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise Refused(f"{host} is no single host: {_HOW}, once for each")
    if address.version == 6 and (address.is_link_local or getattr(address, "scope_id", None)):
        raise Refused(f"{host} can't be granted: an address of one link has no meaning in the sandbox")
    return str(address), port


def _checked_name(given: str) -> str:
    name = given.lower().removesuffix(".")
    if not name.isascii():
        raise Refused(f"{given!r} has to be given as it is in the DNS: xn-- and ASCII")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name) or _NUMBER.fullmatch(name.rpartition(".")[2]):
        raise Refused(f"{given!r} is neither a host's name nor an address: {_HOW}")
    return name


def shown(grant: Grant) -> str:
    """Return the grant as HOST:PORT, with an IPv6 address in brackets."""
    host, port = grant
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def inside_addresses(grants: Iterable[Grant]) -> dict[str, tuple[str, ...]]:
    """Return the addresses that each host has inside the sandbox.
    The addresses depend on the grants alone, since the launcher and the sandbox each compute them.
    """
    hosts = list(dict.fromkeys(host for host, _ in grants))
    free = _free_addresses(set(hosts))
    return {host: _inside(host, free) for host in hosts}


def _inside(host: str, free: Iterator[str]) -> tuple[str, ...]:
    if host == "localhost":
        return LOCALHOST
    return (host,) if is_address(host) else (next(free),)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _free_addresses(taken: set[str]) -> Iterator[str]:
    return (str(address) for address in _NAMES.hosts() if str(address) not in taken)
