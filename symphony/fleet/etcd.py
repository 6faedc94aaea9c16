"""A client of etcd, by the JSON gateway of etcd's third interface.

Methods block for a few seconds at most, so workers call them. If one endpoint does not answer, the next one is asked.
An endpoint may carry out a request and then fail to answer, so callers send only transactions that may be repeated.
"""

from __future__ import annotations

import base64
import errno
import io
import json
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from libsym.errors import ProtocolError, SymError, TimedOut, one_line
from symphony.settings.kinds import address

LIMIT_S, MIN_ATTEMPT_S = 5.0, 1.0
"""Time limits: of a request, which all endpoints share, and the least for one endpoint."""
MAX_ANSWER_BYTES = 4 << 20
"""Size limit of an answer. Parsing a longer text would hold the interpreter's lock for long."""
MAX_SHOWN = 120
"""Maximum number of characters of a strange answer that a message shows."""
_UNAVAILABLE = frozenset({4, 14})
"""gRPC's codes of a member that has no quorum: DEADLINE_EXCEEDED, UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class Record:
    """A key with its value."""

    key: str
    value: bytes
    revision: int
    """Revision of the store in which the key was written last."""
    lease: int
    """Lease with which the record ends. 0: the record has none."""


class Etcd:
    """The members of one etcd cluster."""

    def __init__(self, urls: Sequence[str], context: ssl.SSLContext | None) -> None:
        """`context`: certificates for endpoints of https."""
        self._endpoints = deque(_Endpoint(url, context) for url in urls)

    @property
    def urls(self) -> list[str]:
        """The endpoints. The endpoint that answered last is the first."""
        return [each.url for each in tuple(self._endpoints)]  # a worker may rotate the deque

    def read(self, prefix: str) -> list[Record]:
        """Return all records whose keys begin with `prefix`, as the majority of members has them."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        answer = self._ask("kv/range", {"key": _encoded(prefix), "range_end": _encoded(end)})
        try:
            return [_record(each) for each in answer.get("kvs", ())]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):  # int() of 1e999
            raise ProtocolError(f"etcd sent malformed records: {str(answer)[:MAX_SHOWN]}") from None

    def put(self, key: str, value: bytes, lease: int, revision: int) -> bool:
        """Write a record if its key still has this revision (0: the key is free). Return whether it was written."""
        put = {"key": _encoded(key), "value": base64.b64encode(value).decode(), "lease": str(lease)}
        seen = {"key": _encoded(key), "target": "MOD", "mod_revision": str(revision)}
        answer = self._ask("kv/txn", {"compare": [seen], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded"))

    def grant(self, ttl_s: int) -> int:
        """Return a new lease, which ends if nothing renews it for `ttl_s` seconds."""
        lease = _number(self._ask("lease/grant", {"TTL": str(ttl_s)}), "ID")
        if lease <= 0:  # a record with no lease stays for ever
            raise ProtocolError(f"etcd sent the lease {lease}")
        return lease

    def renew(self, lease: int) -> bool:
        """Renew a lease. Return whether the lease was still there."""
        return _number(self._ask("lease/keepalive", {"ID": str(lease)}), "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End a lease, and all records with it."""
        self._ask("lease/revoke", {"ID": str(lease)})

    def close(self) -> None:
        """End the connections. A later request makes new connections."""
        for endpoint in tuple(self._endpoints):
            endpoint.close()

    def _ask(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        endpoints, failures, deadline_s = tuple(self._endpoints), list[str](), time.monotonic() + LIMIT_S
        for num_tried, endpoint in enumerate(endpoints):
            limit_s = (deadline_s - time.monotonic()) / (len(endpoints) - num_tried)
            try:
                return endpoint.ask(path, request, max(MIN_ATTEMPT_S, limit_s))
            except _Silent as error:
                failures.append(f"{endpoint.url}: {error}")
                self._endpoints.rotate(-1)
        raise TimedOut(f"etcd does not answer ({'; '.join(failures)})")


class _Silent(Exception):  # noqa: N818 - a state of the endpoint
    """An endpoint gave no answer of etcd."""


class _Endpoint:
    """A member of the cluster, with connections that wait for their next request."""

    def __init__(self, url: str, context: ssl.SSLContext | None) -> None:
        self.url = url
        scheme, _, where = url.partition("://")
        self._host, self._port = address(where)
        self._context = context if scheme == "https" else None
        self._idle = deque[HTTPConnection]()

    def ask(self, path: str, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request, and return the answer. _Silent: no answer. SymError: etcd refuses."""
        connection = self._connection(limit_s)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, text = response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a name that no host can have
            connection.close()
            raise _Silent(_reason(error)) from None
        if not response.isclosed():
            connection.close()
            is_long = len(text) == MAX_ANSWER_BYTES
            raise _Silent(f"an answer of more than {MAX_ANSWER_BYTES} bytes" if is_long else "a part of an answer")
        self._idle.append(connection)
        return _answer(status, text)

    def close(self) -> None:
        """End the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _connection(self, limit_s: float) -> HTTPConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.sock is not None and not _is_readable(connection):
                connection.sock.settimeout(limit_s)
                return connection
            connection.close()  # etcd has ended it
        if self._context is None:
            connection = HTTPConnection(self._host, self._port, timeout=limit_s)
        else:
            connection = HTTPSConnection(self._host, self._port, timeout=limit_s, context=self._context)
        connection.response_class = _Response
        return connection


class _Response(HTTPResponse):
    """An answer with limits for the whole of it: the timeout of its socket, and a number of bytes."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_Limited(sock, self.fp.detach()))


class _Limited(io.RawIOBase):
    """Bytes of a socket. `http.client` limits the time of each wait only, and reads a chunk of size -1 for ever."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw = sock, raw
        self._ends_s = time.monotonic() + (sock.gettimeout() or LIMIT_S)
        self._num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int | None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._num_read > 2 * MAX_ANSWER_BYTES:  # chunks have lines of their own
            raise HTTPException("an answer without end")
        self._sock.settimeout(left_s)
        num_read = self._raw.readinto(room)
        self._num_read += num_read or 0
        return num_read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _is_readable(connection: HTTPConnection) -> bool:
    waiting = select.poll()  # select.select() refuses descriptors above 1,023
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


def _answer(status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"result": {"header": dict(), **rest}} | {"header": dict(), **rest}:  # `result`: a message of a stream
            return {str(key): value for key, value in rest.items()}
        case {"code": int(code), "message": str(message)}:
            message = one_line(message)[:MAX_SHOWN]
            if code in _UNAVAILABLE:
                raise _Silent(message)
            raise SymError(f"etcd refuses: {message}", errno.EIO)
    shown = one_line(text[:MAX_SHOWN].decode(errors="replace"))
    raise _Silent(f"no etcd, but HTTP {status}: {shown}")


def _number(answer: Mapping[str, Any], key: str) -> int:
    try:
        return int(answer.get(key, 0))
    except (TypeError, ValueError, OverflowError):
        raise ProtocolError(f"etcd sent a malformed {key}: {str(answer)[:MAX_SHOWN]}") from None


def _record(found: Mapping[str, Any]) -> Record:
    key, value = (base64.b64decode(found.get(each, "")) for each in ("key", "value"))
    return Record(key.decode(), value, int(found["mod_revision"]), int(found.get("lease", 0)))


def _encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _reason(error: OSError | HTTPException | ValueError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    return (getattr(error, "strerror", None) or one_line(str(error)) or type(error).__name__)[:MAX_SHOWN]
