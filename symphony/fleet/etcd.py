"""A client of etcd, by the JSON gateway of etcd's third interface.

Methods block for a few seconds at most, so workers call them. If one endpoint does not answer, the next one is asked.
A transaction is sent once: the endpoint may have carried it out and then failed to answer.
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
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from libsym.errors import ProtocolError, SymError, TimedOut, one_line
from symphony.settings.kinds import address

LIMIT_S, MIN_ATTEMPT_S, WATCH_S = 5.0, 1.0, 10.0
"""Time limits: of a request, which all endpoints share; the least for one endpoint; and of a watch that says nothing.
"""
MAX_ANSWER_BYTES = 4 << 20
"""Size limit of an answer. Parsing a longer text would hold the interpreter's lock for long."""
MAX_SHOWN = 120
"""Maximum number of characters of a strange answer that a message shows."""
RECORDS_AT_ONCE = 1000
"""Maximum number of records in one answer of `read`: each has a key and a value of a few hundred bytes."""
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


@dataclass(frozen=True, slots=True)
class Change:
    """A record that was written, or removed (`value` is None), in a revision of the store."""

    key: str
    value: bytes | None
    revision: int


class Stale(SymError):  # noqa: N818 - a state of the store
    """Error: etcd no longer has the revisions in question, or is another etcd. Read all records anew."""


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
        return self.snapshot(prefix)[0]

    def snapshot(self, prefix: str) -> tuple[list[Record], int]:
        """Return all records whose keys begin with `prefix`, as the majority of members has them, and the revision of
        the store.
        """
        wanted = {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix))}
        records, revision, is_whole = list[Record](), 0, False
        limit = RECORDS_AT_ONCE
        while not is_whole:
            try:
                answer = self._ask("kv/range", {**wanted, "limit": str(limit)})
            except _TooLong as error:
                if limit == 1:
                    raise TimedOut(str(error)) from None
                limit = max(1, limit // 8)
                continue
            try:
                records += (some := [_record(each) for each in answer.get("kvs", ())])
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):  # int() of 1e999
                raise ProtocolError(f"etcd sent malformed records: {str(answer)[:MAX_SHOWN]}") from None
            revision = revision or _revision(answer)
            is_whole = not answer.get("more") or not some
            if some:
                wanted |= {"key": _encoded(some[-1].key + "\0"), "revision": str(revision)}
        return records, revision

    def revision(self) -> int:
        """Return the revision of the store, as the majority of members has it."""
        return _revision(self._ask("kv/range", {"key": _encoded("\0"), "count_only": True}))

    def commit(self, compare: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> tuple[bool, int]:
        """Make the changes `then` if all comparisons hold. Return whether they held, and the revision of the store.

        TimedOut: the changes may have been made.
        """
        answer = self._ask("kv/txn", {"compare": compare, "success": then}, once=True)
        return bool(answer.get("succeeded")), _revision(answer)

    def put(self, key: str, value: bytes, lease: int, revision: int) -> bool:
        """Write a record if its key still has this revision (0: the key is free). Return whether it was written."""
        return self.commit([has_revision(key, revision)], [putting(key, value, lease)])[0]

    def watch(self, prefix: str, seen: int) -> Watch:
        """Return the changes of records whose keys begin with `prefix`, after the revision `seen`."""
        failures = list[str]()
        for endpoint in tuple(self._endpoints):
            try:
                return Watch(endpoint.connection(WATCH_S, is_new=True), prefix, seen)
            except _Silent as error:
                failures.append(f"{endpoint.url}: {error}")
                self._endpoints.rotate(-1)
        raise TimedOut(f"etcd does not answer ({'; '.join(failures)})")

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

    def _ask(self, path: str, request: Mapping[str, Any], *, once: bool = False) -> dict[str, Any]:
        endpoints, failures, deadline_s = tuple(self._endpoints), list[str](), time.monotonic() + LIMIT_S
        for num_tried, endpoint in enumerate(endpoints):
            limit_s = (deadline_s - time.monotonic()) / (len(endpoints) - num_tried)
            try:
                return endpoint.ask(path, request, max(MIN_ATTEMPT_S, limit_s))
            except _Silent as error:
                failures.append(f"{endpoint.url}: {error}")
                self._endpoints.rotate(-1)
                if once and error.was_sent:
                    break
        raise TimedOut(f"etcd does not answer ({'; '.join(failures)})")


def putting(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Return the change that writes a record."""
    return {"request_put": {"key": _encoded(key), "value": base64.b64encode(value).decode(), "lease": str(lease)}}


def removing(key: str) -> dict[str, Any]:
    """Return the change that removes a record."""
    return {"request_delete_range": {"key": _encoded(key)}}


def has_revision(key: str, revision: int) -> dict[str, Any]:
    """Return the comparison that a record was written last in this revision. 0: there is no such record."""
    return {"key": _encoded(key), "target": "MOD", "mod_revision": str(revision)}


def is_there(key: str) -> dict[str, Any]:
    """Return the comparison that there is such a record."""
    return {"key": _encoded(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}


def has_value(key: str, value: bytes) -> dict[str, Any]:
    """Return the comparison that a record has this value."""
    return {"key": _encoded(key), "target": "VALUE", "value": base64.b64encode(value).decode()}


def is_empty(prefix: str) -> dict[str, Any]:
    """Return the comparison that no record has a key that begins with `prefix`."""
    return has_revision(prefix, 0) | {"range_end": _encoded(_end_of(prefix))}


class _Silent(Exception):  # noqa: N818 - a state of the endpoint
    """An endpoint gave no answer of etcd."""

    was_sent = True
    """Whether the endpoint may have carried out the request."""


class _TooLong(Exception):  # noqa: N818 - a state of the request
    """An answer has too many bytes."""


class _Endpoint:
    """A member of the cluster, with connections that wait for their next request."""

    def __init__(self, url: str, context: ssl.SSLContext | None) -> None:
        self.url = url
        scheme, _, where = url.partition("://")
        self._host, self._port = address(where)
        self._context = context if scheme == "https" else None
        self._idle = deque[HTTPConnection]()
        self._num_closed = 0
        """How often the connections were ended. A request that is under way then ends its own at its end."""

    def ask(self, path: str, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request, and return the answer. _Silent: no answer. SymError: etcd refuses."""
        num_closed, connection = self._num_closed, self.connection(limit_s)
        try:
            if connection.sock is None:
                connection.connect()
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a name that no host can have
            silent = _Silent(_reason(error))
            silent.was_sent = False
            raise silent from None
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, text = response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            raise _Silent(_reason(error)) from None
        if not response.isclosed():
            connection.close()
            if len(text) == MAX_ANSWER_BYTES:
                raise _TooLong(f"etcd sent an answer of more than {MAX_ANSWER_BYTES} bytes")
            raise _Silent("a part of an answer")
        self._idle.append(connection)
        if num_closed != self._num_closed:
            self.close()
        return _answer(status, text)

    def close(self) -> None:
        """End the idle connections."""
        self._num_closed += 1
        while self._idle:
            self._idle.pop().close()

    def connection(self, limit_s: float, *, is_new: bool = False) -> HTTPConnection:
        """Return a connection that waits for its next request, or with `is_new` one that is not connected yet."""
        while self._idle and not is_new:
            connection = self._idle.pop()
            if connection.sock is not None and not _is_readable(connection):
                connection.sock.settimeout(limit_s)
                return connection
            connection.close()  # etcd has ended it
        if self._context is None:
            connection = HTTPConnection(self._host, self._port, timeout=limit_s)
        else:
            connection = HTTPSConnection(self._host, self._port, timeout=limit_s, context=self._context)
        if not is_new:
            connection.response_class = _Response
        return connection


class Watch:
    """A stream of changes, ordered by revision. After an error, begin another stream at the next revision."""

    def __init__(self, connection: HTTPConnection, prefix: str, seen: int) -> None:
        """Begin after the revision `seen`. The time limit of `connection` is that of each wait for a change.

        The stream begins at `seen` itself: some releases of etcd leave out the removals of a revision to which the
        store was compacted (etcd 18089).
        """
        self._seen = seen
        wanted = {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix)), "start_revision": str(seen)}
        self._connection = connection
        try:
            create = {**wanted, "fragment": True}  # an answer has no more bytes than a request of etcd may have
            connection.request("POST", "/v3/watch", json.dumps({"create_request": create}))
            self._response = connection.getresponse()
            reached = _revision(self._message())
        except (OSError, HTTPException, ValueError) as error:
            self.close()
            raise _Silent(_reason(error)) from None
        # A new etcd begins at revision 1, and would be silent until it reaches `revision`.
        if reached < seen:
            self.close()
            raise Stale(f"etcd is at revision {reached}, and was at {seen}: it is another etcd", errno.ESTALE)

    def next(self) -> list[Change]:
        """Return the next changes. The list is empty if nothing has changed within the time limit. The stream has ended
        then, because a member that is cut off from the others says nothing either.
        """
        while True:
            try:
                changes = self._next()
            except TimeoutError:
                return []
            except SymError:
                raise
            except (OSError, HTTPException, ValueError, _Silent) as error:
                raise TimedOut(f"etcd does not answer ({_reason(error)})") from None
            if changes := [each for each in changes if each.revision > self._seen]:
                return changes

    def _next(self) -> list[Change]:
        changes, is_whole = list[Change](), False
        while not is_whole:  # the changes of one revision are made together
            message = self._message()
            if message.get("canceled"):
                self.close()
                raise Stale(f"etcd ended the watch: compacted at {message.get('compact_revision')}", errno.ESTALE)
            try:
                changes += [_change(each) for each in message.get("events", ())]
            except (AttributeError, KeyError, TypeError, ValueError):
                raise ProtocolError(f"etcd sent malformed changes: {str(message)[:MAX_SHOWN]}") from None
            is_whole = not message.get("fragment")
        return changes

    def shut(self) -> None:
        """End the stream. A thread that waits in `next` fails immediately."""
        with suppress(OSError, AttributeError):  # AttributeError: closed already
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. No thread may use it any more."""
        self._connection.close()

    def _message(self) -> dict[str, Any]:
        line = self._response.readline(MAX_ANSWER_BYTES)
        if not line:
            raise _Silent("etcd ended the watch")
        if not line.endswith(b"\n"):
            raise Stale(f"etcd sent changes of more than {MAX_ANSWER_BYTES} bytes", errno.ESTALE)
        return _answer(self._response.status, line)


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
        case {"result": {"header": dict()} as whole} | ({"header": dict()} as whole):  # `result`: of a stream
            return {str(key): value for key, value in whole.items()}
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


def _change(event: Mapping[str, Any]) -> Change:
    record = event["kv"]
    value = None if event.get("type") == "DELETE" else base64.b64decode(record.get("value", ""))
    return Change(base64.b64decode(record["key"]).decode(), value, int(record["mod_revision"]))


def _revision(answer: Mapping[str, Any]) -> int:
    return _number(answer["header"], "revision")


def _end_of(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    return (getattr(error, "strerror", None) or one_line(str(error)) or type(error).__name__)[:MAX_SHOWN]
