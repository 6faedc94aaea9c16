"""Accounts of local clients: asks the kernel for the uid that owns a connection.

sock_diag shows the uid of every socket of this network namespace, even to an unprivileged process. The kernel's answer
is about the socket that has the client's address and port now. So three checks follow:

- The socket has an inode. A connection that its client has closed is shown with uid 0 and inode 0.
- The socket is connected, and to this server's address. Otherwise it could be a listener on the client's port.
- This server's end is still open afterwards. Until then the kernel gives no other socket the same two addresses and
  ports.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2  # linux/netlink.h, linux/sock_diag.h
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: bytes, type, flags, sequence, port
_QUESTION = struct.Struct("=BBBBI")  # inet_diag_req_v2: family, protocol, extensions, padding, states
_ENDS = struct.Struct(">HH16s16s")  # inet_diag_sockid: ports and addresses of the socket's own end and of its peer
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
_ANSWER = struct.Struct("=BBBB48sIIIII")  # inet_diag_msg: family, state, ..., sockid, ..., uid, inode
_CONNECTED = {1, 4, 5}  # ESTABLISHED; FIN_WAIT1 and FIN_WAIT2 after a shutdown
_OUR_END = {1, 8}  # ESTABLISHED; CLOSE_WAIT after the client has shut down its side
_NOBODY = 65534  # the overflow uid: shown for uids that this user namespace does not map
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def uid_of(connection: socket.socket) -> int | None:
    """Return the uid of the client. None: the kernel knows no account of this machine for the client.

    OSError: this process may not ask the kernel.
    """
    uid = _uid_by_credentials(connection) if connection.family == socket.AF_UNIX else _uid_by_socket(connection)
    return None if uid == _NOBODY else uid


def _uid_by_credentials(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _uid_by_socket(connection: socket.socket) -> int | None:
    try:
        client, client_port = _end(connection.getpeername())
        server, port = _end(connection.getsockname())
    except OSError:  # the client has closed the connection
        return None
    if not client.is_loopback or client.version != server.version:
        return None
    uid = _owner(client, client_port, server, port)
    return uid if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _OUR_END else None


def _end(address: tuple[str, int]) -> tuple[_Ip, int]:
    return _unmapped(ipaddress.ip_address(address[0].partition("%")[0])), address[1]


def _unmapped(address: _Ip) -> _Ip:
    return getattr(address, "ipv4_mapped", None) or address


def _owner(client: _Ip, client_port: int, server: _Ip, port: int) -> int | None:
    family = socket.AF_INET if client.version == 4 else socket.AF_INET6
    ends = _ENDS.pack(client_port, port, client.packed, server.packed)
    asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        diag.sendto(_HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + asked, (0, 0))
        answer = diag.recv(1 << 12, socket.MSG_DONTWAIT)  # the kernel has answered before sendto returns
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # there is no such socket
    family, state, _, _, found, *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    found_port, found_server_port, *found_addresses = _ENDS.unpack_from(found)
    size = 4 if family == socket.AF_INET else 16
    addresses = [_unmapped(ipaddress.ip_address(each[:size])) for each in found_addresses]
    is_it = (found_port, found_server_port, addresses) == (client_port, port, [client, server])
    return int(uid) if is_it and state in _CONNECTED and inode else None
