"""The pages at / and /tree: files of their own, without resources from other servers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lips.gateway.asgi import Outlet, Streamed, event
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.gateway import Gateway

PLACE = Path(__file__).with_name("page")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy that allows only the page's own files, and requests to this server."""


def _read(name: str) -> tuple[bytes, dict[str, str]]:
    content = (PLACE / name).read_bytes()
    return content, {
        "content-type": f"{_KINDS[Path(name).suffix]}; charset=utf-8",
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{sha256(content).hexdigest()[:16]}"',
    }


_FILES = {name: _read(name) for name in sorted(path.name for path in PLACE.iterdir())}


async def page(request: Request) -> Response:
    """Serve the page. No key is needed: the page has no data of tenants, and asks the user for a key if need be."""
    name = request.path_params.get("name", "tree.html" if request.url.path == "/tree" else "index.html")
    if name not in _FILES:
        raise ApiError(404, f"there is no /page/{name[:60]}")
    content, headers = _FILES[name]
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


async def proof(request: Request) -> Streamed:
    """Prove to a page that this server knows the page's key. The answer stays open, and its end voids the proof."""
    gateway: Gateway = request.app.state.gateway
    asked = request.query_params
    proved = gateway.keys.prove(asked.get("challenge", ""), asked.get("proof", ""))
    if proved is None:
        raise ApiError(401, "this server knows no such key", code="invalid_api_key")

    async def answer(outlet: Outlet) -> None:
        outlet.put(event({"proof": proved}))
        await outlet.flush()
        await gateway.ending.wait()

    return Streamed(answer, lambda error: event(openai_form(error)))


routes = [Route("/", page), Route("/tree", page), Route("/proof", proof), Route("/page/{name}", page)]
