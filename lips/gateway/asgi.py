"""The HTTP side of requests: bodies are read within limits, and a disconnect ends the answer within a step."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, ClassVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import libsym as sym
from lips.gateway.errors import STATUSES, ApiError, form_at, from_system
from lips.gateway.log import SEEN

log = logging.getLogger(__name__)

EVENTS = b"text/event-stream; charset=utf-8"
_MOST_BUFFERED = 64 << 10
"""Bytes in a connection's buffer from which parts wait."""
LINES = b"application/x-ndjson"
_STREAM_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
LINGERS_S = 5.0
"""Time for which the client of an answered request may still send the rest of the body."""
WRITE_S = 60.0
"""Time for which a client may leave its answer unread. After this time the gateway treats the client as disconnected.
"""


async def read_body(request: Request, max_bytes: int, max_s: float, hold: Callable[[int], None]) -> bytes:
    """Return the whole body, or raise ApiError if it is too large or too late.

    `hold` reserves the body's bytes: before the first read if the request declares its length, else as they arrive.
    """
    declared = request.headers.get("content-length", "0")
    num_held = int(declared) if declared.isdecimal() else 0
    if num_held > max_bytes:
        raise _too_large(max_bytes)
    hold(num_held)
    found = bytearray()
    try:
        with anyio.fail_after(max_s):
            async for part in request.stream():
                found += part
                if len(found) > max_bytes:
                    raise _too_large(max_bytes)
                if len(found) > num_held:
                    hold(len(found) - num_held)
                    num_held = len(found)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {max_s:g} s") from None
    return bytes(found)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the most that is taken")


class Exchange:
    """A request and its answer. After the answer, the exchange reads and drops the rest of the request's body.

    Hypercorn waits until the application has taken each part of a body, even while the application sends the end of
    the answer. A connection that is closed with unread bytes loses the answer.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_whole = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not is_end or self._is_whole:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with anyio.move_on_after(LINGERS_S):
            while not self._is_whole:
                await self.receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._drop)
            await self._send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()

    async def _drop(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of the interface at the path."""
    return Json(form_at(path)(error), error.status, error.headers)


class Json(Response):
    """A JSON object as the answer."""

    media_type = "application/json"

    def __init__(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_utf8(json.dumps(content, ensure_ascii=False)), status, headers)


_dumped = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
"""Escapes of characters that some clients treat as the end of a line, and so of an event."""


def _utf8(text: str) -> bytes:
    """Return JSON in UTF-8. Lone surrogates, from a file's name or a model's text, are replaced."""
    return text.encode() if text.isascii() else text.translate(_LINE_ENDS).encode(errors="replace")


def event(data: object, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else _dumped(data)
    return _utf8(f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n")


def line(data: object) -> bytes:
    """Return a line of a stream of JSON objects."""
    return _utf8(_dumped(data)) + b"\n"


class Template:
    """An event with one text that differs from part to part. The rest of its JSON is written once."""

    MARK: ClassVar[str] = secrets.token_hex()
    """Value that stands for the text."""

    def __init__(self, data: object) -> None:
        self._head, self._tail = event(data).split(f'"{self.MARK}"'.encode())

    def filled(self, text: str) -> bytes:
        return self._head + _utf8(encode_basestring(text)) + self._tail


class Work(ABC):
    """The answer of an endpoint. A disconnect of the client cancels the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_when_gone, receive, tasks.cancel_scope)
            try:
                with anyio.CancelScope() as stalled:
                    await self._answer(scope, receive, _in_time(send, stalled))
            except ClientDisconnect:
                pass
            finally:
                tasks.cancel_scope.cancel()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""

    async def _fail(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(told(error), scope["path"])(scope, receive, send)


class Whole(Work):
    """An answer that is sent as a whole when it is complete."""

    def __init__(self, answer: Callable[[], Awaitable[object]]) -> None:
        self._make = answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = await self._make()
        except Exception as error:  # noqa: BLE001 - `told` knows every kind
            await self._fail(error, scope, receive, send)
        else:
            await Json(found)(scope, receive, send)


class Outlet:
    """The body of a streamed answer.

    `put` writes a part to the connection's transport itself: the way through Hypercorn costs several times as much. The
    first part, and parts for which a client leaves no room or that it no longer reads, wait for `flush`, which goes
    through Hypercorn.
    """

    def __init__(self, scope: Scope, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send, self._headers = send, headers
        self._transport: asyncio.WriteTransport = scope["state"]["transport"]
        self._is_chunked = scope["http_version"] >= "1.1"
        self._waiting: list[bytes] = []
        self._flushing = anyio.Lock(fast_acquire=True)
        self.has_begun = False
        """Whether the response has begun."""

    @property
    def is_waiting(self) -> bool:
        """Whether parts wait for `flush`."""
        return bool(self._waiting)

    def put(self, part: bytes) -> None:
        """Send a part, or let it wait."""
        transport = self._transport
        is_full = transport.get_write_buffer_size() > _MOST_BUFFERED
        if not self.has_begun or self._waiting or is_full or transport.is_closing():
            self._waiting.append(part)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)

    async def flush(self) -> None:
        """Send the parts that wait. The client decides how long this takes."""
        async with self._flushing:
            while self._waiting:
                if not self.has_begun:
                    self.has_begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                parts, self._waiting = b"".join(self._waiting), []
                await self._send({"type": "http.response.body", "body": parts, "more_body": True})


class Streamed(Work):
    """An answer that is sent part by part. A failure before the first part sets the status of the response."""

    def __init__(
        self,
        answer: Callable[[Outlet], Awaitable[None]],
        failed: Callable[[ApiError], bytes],
        media_type: bytes = EVENTS,
    ) -> None:
        """`answer` puts the parts into an outlet. `failed` returns the part that reports a failure."""
        self._headers = [(b"content-type", media_type), *_STREAM_HEADERS]
        self._make = answer
        self._failed = failed

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(scope, send, self._headers)
        try:
            await self._make(outlet)
        except Exception as error:  # noqa: BLE001 - `told` knows every kind
            if not outlet.has_begun:
                await self._fail(error, scope, receive, send)
                return
            outlet.put(self._failed(told(error)))
        await outlet.flush()
        await send({"type": "http.response.body", "body": b""})


def told(error: BaseException) -> ApiError:
    """Return the error as a client sees it. Faults of the gateway are logged; the client gets only their type."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, sym.SymError) or (isinstance(error, OSError) and error.errno in STATUSES):
        return from_system(error)
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the gateway failed: {type(error).__name__}")


def _in_time(send: Send, stalled: anyio.CancelScope) -> Send:
    """Return a `send` that cancels `stalled` if the client reads nothing for WRITE_S."""

    async def send_in_time(message: Any) -> None:
        with anyio.move_on_after(WRITE_S) as scope:
            await send(message)
        if scope.cancelled_caught:
            SEEN.get().is_gone = True
            stalled.cancel()
            await anyio.lowlevel.checkpoint()

    return send_in_time


async def _end_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    SEEN.get().is_gone = True
    scope.cancel()
