"""The application: every interface's routes, errors in each interface's form, and a count of what was answered."""

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
from lips.gateway import chat, completions, messages, ollama, page, plain, responses, sessions
from lips.gateway.asgi import Exchange, Form, error_response, told
from lips.gateway.errors import ApiError, anthropic_form, ollama_form, openai_form
from lips.gateway.gateway import ENDED, IGNORED, Gateway
from lips.gateway.log import SEEN, Seen

ROUTES: Sequence[BaseRoute] = [
    *chat.routes,
    *completions.routes,
    *messages.routes,
    *responses.routes,
    *ollama.routes,
    *plain.routes,
    *sessions.routes,
    *page.routes,
]
_FORMS: dict[str, Form] = {"/v1/messages": anthropic_form, "/api/": ollama_form}


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
    """Counts answers by route and status, tells the log of each, and keeps what is somebody's out of caches."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        exchange = Exchange(receive, send)

        seen = Seen.of(scope)
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


def _form_of(request: Request) -> Form:
    return next((form for path, form in _FORMS.items() if request.url.path.startswith(path)), openai_form)


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(told(error), _form_of(request))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    said = {404: f"there is no {path}", 405: f"{request.method} is not for {path}"}.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, said), _form_of(request))


async def _nobody_reads(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)
