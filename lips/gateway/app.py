"""The application: every interface's routes, errors in each interface's form, and a count of answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import libsym as sym
from lips.gateway import chat, completions, messages, ollama, page, plain, responses, sessions, tree
from lips.gateway.asgi import Exchange, error_response, told
from lips.gateway.errors import ApiError
from lips.gateway.gateway import ENDED, IGNORED, Gateway
from lips.gateway.log import SEEN, LoggedRequest

ROUTES: Sequence[BaseRoute] = [
    *chat.routes,
    *completions.routes,
    *messages.routes,
    *responses.routes,
    *ollama.routes,
    *plain.routes,
    *sessions.routes,
    *tree.routes,
    *page.routes,
]


def make_app(gateway: Gateway) -> ASGIApp:
    app = Starlette(
        routes=list(ROUTES),
        exception_handlers={
            ApiError: _refuse,
            sym.SymError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _nobody_reads,
            Exception: _refuse,
        },
    )
    app.state.gateway = gateway
    return _Counted(app, gateway)


class _Counted:
    """Middleware that counts answers by route and status, logs each, and forbids caches to store them."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        exchange = Exchange(receive, send)

        seen = LoggedRequest.of(scope)
        SEEN.set(seen)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault("cache-control", "no-store")
                headers.setdefault("x-content-type-options", "nosniff")
                if IGNORED in scope and scope[IGNORED].paths:
                    headers["symphony-ignored"] = scope[IGNORED].header
                route = getattr(scope.get("route"), "path", "other")
                self._gateway.num_requests[route, message["status"]] += 1
            await exchange.send(message)

        with ExitStack() as scope[ENDED]:
            scope[ENDED].callback(seen.tell)
            await self._app(scope, exchange.receive, counted)


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(told(error), request.url.path)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    said = {404: f"there is no {path}", 405: f"{request.method} is not for {path}"}.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, said), request.url.path)


async def _nobody_reads(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)
