"""The connection between two daemons: TLS in which both sides show a certificate, and messages.

A peer is another daemon whose certificate the same authority has signed. A peer is trusted: a daemon believes the peer
on which user asks.

    client                                  server
    length, Ask as JSON              ──►
                                     ◄──    length, Offer or {"errno", "message"} as JSON
                                     ◄──    the image's header; digests of its full pages; bytes behind these pages
    count, numbers of full pages     ──►
                                     ◄──    the bytes of these pages, in this order

    length, Copy as JSON             ──►
                                     ◄──    length, {} or {"errno", "message"} as JSON

    length, Held as JSON             ──►
                                     ◄──    length, {"held": [entries of each version that are there]} as JSON

Lengths, counts and numbers are u32, little-endian. The client closes the connection. Methods of `Link` block, so only
workers call them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from kvfs.images.format import LENGTH_BYTES, MAX_HEADER_BYTES
from libsym.errors import Invalid, ProtocolError, SymError, TimedOut, error_for

T = TypeVar("T")

CONNECT_S, IDLE_S = 5.0, 30.0
"""Time limits: for connecting with the exchange of certificates, and for each wait for the other side."""
ALIVE_S = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Time until a silent connection is probed, time between two probes, and number of probes that may fail. So a machine
without power ends the wait of a copy within 11 s, and another machine can get the copy.
"""
MAX_MESSAGE_BYTES = 1 << 20
MAX_TEXT, MAX_MARKS, MAX_ERRNO = 4096, 1000, 4096
"""Limits of what a peer says: characters of an error, marks of a file, and the first number that is no errno."""
MAX_HELD = 64
"""Maximum number of versions in one question."""
VERSION = re.compile(r"[0-9a-z]{1,64}\.[0-9a-f]{1,64}")
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "machine.pem", "machine.key"
"""Files of a directory of keys: the certificate of the authority, and the daemon's own certificate with its key."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a file, in the name of a user of the asking daemon."""

    path: str
    uid: int
    gid: int
    groups: list[int]


@dataclass(frozen=True, slots=True)
class Copy:
    """A request to fetch a version of a fleet's file, and to sync it."""

    version: str
    """IDENT.GENERATION."""
    machine: str
    """The machine that asks, and has the version."""


@dataclass(frozen=True, slots=True)
class Held:
    """A question: how many entries of each version of a fleet's files the peer has."""

    held: list[str]
    """Versions: IDENT.TAG."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The shape of a file that may be read. `marks`: as `KvFile.marks`, with a mark for every entry."""

    size: int
    header_bytes: int
    marks: list[tuple[str, int]]


def ask_of(message: dict[str, Any]) -> Ask | Copy | Held:
    """Return a peer's message as a request."""
    match message:
        case {"version": str(version), "machine": str(machine)} if VERSION.fullmatch(version):
            return Copy(version, machine)
        case {"held": list(versions)} if len(versions) <= MAX_HELD:
            if all(isinstance(each, str) and VERSION.fullmatch(each) for each in versions):
                return Held(versions)
        case {"path": str(path), "uid": int(uid), "gid": int(gid), "groups": list(groups)}:
            if all(isinstance(each, int) for each in groups):
                return Ask(path, uid, gid, groups)
    raise ProtocolError(f"a peer asked for {str(message)[:MAX_TEXT]}")


def require_done(message: dict[str, Any], other: str) -> None:
    """Raise the error that a peer's message has, if any."""
    match message:
        case {"errno": int(code), "message": str(text)} if 0 < code < MAX_ERRNO:
            raise error_for(code, f"{other}: {text[:MAX_TEXT]}")


def offer_of(message: dict[str, Any], other: str) -> Offer:
    """Return a peer's message as an offer, or raise the error that the message has."""
    require_done(message, other)
    match message:
        case {"size": int(size), "header_bytes": int(header_bytes), "marks": list(marks)}:
            pairs = [(mark, stop) for mark, stop in filter(_is_mark, marks)]
            if 0 <= header_bytes <= LENGTH_BYTES + MAX_HEADER_BYTES and len(pairs) == len(marks) <= MAX_MARKS:
                return Offer(size, header_bytes, pairs)
    raise ProtocolError(f"{other} offered {str(message)[:MAX_TEXT]}")


def held_of(message: dict[str, Any], asked: Held, other: str) -> list[int]:
    """Return a peer's answer to a question, or raise the error that the message has."""
    require_done(message, other)
    match message:
        case {"held": list(held)} if len(held) == len(asked.held):
            if all(isinstance(each, int) and 0 <= each < 1 << 63 for each in held):
                return held
    raise ProtocolError(f"{other} answered {str(message)[:MAX_TEXT]}")


def _is_mark(mark: object) -> bool:
    match mark:
        case [str(), int()]:
            return True
    return False


def private(path: str, flags: int) -> int:
    """Open a file. If it is new, only its owner may read it."""
    return os.open(path, flags, 0o600)


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS settings of a server and of a client, with the keys in a directory.

    Invalid: a key is missing or malformed, or other users may read the daemon's key.
    """
    try:
        mode = (directory / KEY).stat()
        if mode.st_uid not in {0, os.geteuid()} or stat.S_IMODE(mode.st_mode) & 0o077:
            raise Invalid(f"{directory / KEY} must belong to the daemon's user, and only that user may read it (0600)")
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(directory / AUTHORITY)
            context.load_cert_chain(directory / CERTIFICATE, directory / KEY, lambda: "")  # never ask for a password
    except (OSError, ssl.SSLError) as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(f"no keys for peers in {directory}: {error}; see symphony-fleet(1)") from None
    return server, client


def require_name(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Raise Invalid unless peers believe that the certificate of `server` is that of the machine `name`."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname=name)
    answering = server.wrap_bio(there, back, server_side=True)
    try:
        for side in (asking, answering, asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        why = str(getattr(error, "verify_message", "") or error).rstrip(".")
        raise Invalid(f"no peer would take this daemon for {name}: {why}; see `machine` in symphony.toml(5)") from None


class Link:
    """Connection to a peer, from either side. Errors of the network are TimedOut, or have the errno EHOSTUNREACH."""

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._connection = connection
        self.other = other

    @classmethod
    def connected(cls, context: ssl.SSLContext, name: str, address: tuple[str, int]) -> Link:
        """Connect to the peer `name`, whose certificate must have that name."""
        try:
            plain = socket.create_connection(address, timeout=CONNECT_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ALIVE_S:
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
            tls = context.wrap_socket(plain, server_hostname=name)
            tls.settimeout(IDLE_S)
            return cls(tls, name)
        except (OSError, ValueError) as error:  # ValueError: a name that no host can have
            raise _told(error, name) from None

    async def accept(self, context: ssl.SSLContext) -> None:
        """Exchange certificates with the peer that has connected. Until then the peer is a stranger, so this takes no
        worker. Only the trio thread calls this method.
        """
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small answers wait for no ack
            self._connection.setblocking(False)
            self._connection = tls = context.wrap_socket(
                self._connection, server_side=True, do_handshake_on_connect=False
            )
            with trio.fail_after(CONNECT_S):
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        await trio.lowlevel.wait_readable(tls)
                    except ssl.SSLWantWriteError:
                        await trio.lowlevel.wait_writable(tls)
        except trio.TooSlowError:
            raise TimedOut(f"{self.other} shows no certificate") from None
        except OSError as error:
            raise _told(error, self.other) from None
        self._connection.settimeout(IDLE_S)

    async def wait_readable(self, limit_s: float) -> None:
        """Wait, without a worker, until the peer has sent something."""
        assert isinstance(self._connection, ssl.SSLSocket)
        if not self._connection.pending():
            with trio.move_on_after(limit_s) as waiting:
                await trio.lowlevel.wait_readable(self._connection)
            if waiting.cancelled_caught:
                raise TimedOut(f"{self.other} does not answer")

    def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes."""
        try:
            for part in parts:
                self._connection.sendall(part)
        except OSError as error:
            raise _told(error, self.other) from None

    def receive_into(self, room: memoryview) -> None:
        """Fill `room` with the next bytes."""
        at = 0
        try:
            while at < len(room):
                num_read = self._connection.recv_into(room[at:])
                if not num_read:
                    raise ConnectionResetError(0, "the other side ended the connection")
                at += num_read
        except OSError as error:
            raise _told(error, self.other) from None

    def receive(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        room = bytearray(size)
        self.receive_into(memoryview(room))
        return bytes(room)

    def send_message(self, message: Ask | Copy | Held | Offer | dict[str, Any]) -> None:
        """Send a message as JSON."""
        text = json.dumps(message if isinstance(message, dict) else asdict(message)).encode()
        self.send(len(text).to_bytes(4, "little"), text)

    def receive_message(self) -> dict[str, Any]:
        """Return the next message."""
        size = int.from_bytes(self.receive(4), "little")
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{self.other} announced a message of {size} bytes: {MAX_MESSAGE_BYTES} is the most")
        try:
            message = json.loads(self.receive(size))
        except (ValueError, RecursionError):  # RecursionError: brackets nested by the thousand
            message = None
        if not isinstance(message, dict):
            raise ProtocolError(f"{self.other} sent a message that is no object of JSON")
        return message

    def shut(self) -> None:
        """End the connection. A thread that waits for the other side fails immediately."""
        with suppress(OSError):  # the other side may have ended it
            # `SSLSocket.shutdown` removes the encryption first, so a worker could still send plain bytes
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. No thread may use the connection any more."""
        self._connection.close()


class Shuttable(Protocol):
    """A connection that a thread may wait for."""

    def shut(self) -> None:
        """End the connection, so that the thread fails immediately."""
        ...


async def in_worker(link: Shuttable, limiter: trio.CapacityLimiter, what: Callable[..., T], *arguments: object) -> T:
    """Run a function that uses `link` in a worker. If the task is cancelled, end the connection, and wait for the
    worker.
    """
    is_over, found, error = False, list[T](), None

    async def shut_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if not is_over:
                link.shut()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shut_when_cancelled)
        try:
            found.append(await trio.to_thread.run_sync(what, *arguments, limiter=limiter))
        except Exception as raised:  # noqa: BLE001 - raised below, outside of the nursery, which would make a group
            error = raised
        is_over = True
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return found[0]


def _told(error: OSError | ValueError, other: str) -> SymError:
    """Return an error of the network as an error of libsym."""
    if isinstance(error, TimeoutError):
        return TimedOut(f"{other} does not answer")
    return SymError(f"no connection to {other}: {getattr(error, 'strerror', None) or error}", errno.EHOSTUNREACH)
