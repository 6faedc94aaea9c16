"""Routes that generate nothing: models, tokens, health and metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import Json
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.prompts import messages_of
from lips.gateway.reader import asker, received


async def models(request: Request) -> Response:
    """List the one model of the server. The client Codex reads `models` beside `data`."""
    gateway, _ = await asker(request)
    described = _model(gateway)
    return Json({"object": "list", "data": [described], "models": [described]})


async def model(request: Request) -> Response:
    gateway, _ = await asker(request)
    if (name := request.path_params["name"]) != gateway.model.name:
        raise ApiError(
            404, f"there is no model {name[:60]}: this server has {gateway.model.name}", code="model_not_found"
        )
    return Json(_model(gateway))


def _model(gateway: Gateway) -> dict[str, Any]:
    name = gateway.model.name
    return {
        "id": name,
        "slug": name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "symphony",
        "max_model_len": gateway.model.max_positions,
        "type": "model",
        "display_name": name,
    }


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text or of messages."""
    got = await received(request)
    fields, gateway = got.fields, got.gateway
    if fields.has("messages"):
        tokens = await gateway.prompts.tokens(messages_of(fields), fields.list("tools"))
    else:
        text = fields.text("prompt", fields.text("content"))
        if text is None:
            raise ApiError(400, "prompt is missing: a text, or messages", param="prompt")
        tokens = await sym.aio.tokenize(text, special=fields.flag("special", True))
    return Json({"tokens": tokens, "count": len(tokens), "max_model_len": gateway.model.max_positions})


async def detokenize(request: Request) -> Response:
    got = await received(request)
    fields, gateway = got.fields, got.gateway
    text = await sym.aio.detokenize(_tokens(fields, gateway.model.vocab_size))
    return Json({"prompt": text, "content": text})


def _tokens(fields: Fields, vocab_size: int) -> list[int]:
    fields.required("tokens")
    found = fields.list("tokens") or []
    if not all(type(each) is int and 0 <= each < vocab_size for each in found):
        raise fields.wrong("tokens", f"a list of whole numbers from 0 to {vocab_size - 1}")
    return found


async def health(_request: Request) -> Response:
    """Answer 200 if the daemon answers, else 503 with the reason."""
    await sym.aio.connect()
    await sym.aio.daemon_stat()
    return Json({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Return the server's load and the tenant's usage in Prometheus' text format. This request needs a key, like a
    request for an answer.
    """
    gateway, tenant = await asker(request)
    admission = gateway.admission
    lines = [
        *_metric("running", "gauge", "Requests that are being answered.", admission.num_running),
        *_metric("waiting", "gauge", "Requests that wait for their turn.", admission.num_waiting),
        *_metric("refused_total", "counter", "Requests that were told to come again.", admission.num_refused),
        *_metric("gone_total", "counter", "Generations that ended because the client had gone.", gateway.num_gone),
        *_metric("prompt_tokens_total", "counter", "Tokens of the tenant's prompts.", tenant.usage.num_prompt),
        *_metric("cached_tokens_total", "counter", "Prompt tokens that were not computed.", tenant.usage.num_cached),
        *_metric("completion_tokens_total", "counter", "Tokens of the tenant's answers.", tenant.usage.num_completion),
        *_metric("cache_entries", "gauge", "KV files in the tenant's cache.", len(tenant.cache)),
        "# HELP symphony_gateway_requests_total Requests by route and status.",
        "# TYPE symphony_gateway_requests_total counter",
    ]
    for (route, status), count in sorted(gateway.num_requests.items()):
        lines.append(f'symphony_gateway_requests_total{{route="{route}",status="{status}"}} {count}')
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _metric(name: str, kind: str, says: str, value: float) -> list[str]:
    full = f"symphony_gateway_{name}"
    return [f"# HELP {full} {says}", f"# TYPE {full} {kind}", f"{full} {value}"]


routes = [
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health),
    Route("/metrics", metrics),
]
