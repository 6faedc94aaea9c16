"""Routes that list, show, fork, undo, export and remove conversations, which are files."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import Any, BinaryIO
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import libsym as sym
from lips.gateway.asgi import Json
from lips.gateway.errors import ApiError
from lips.gateway.gateway import Gateway
from lips.gateway.places import open_file
from lips.gateway.reader import asker
from lips.gateway.tenants import LOCAL, Tenant

_SUFFIX = ".kv"
_PART_BYTES = 1 << 20


async def sessions(request: Request) -> Response:
    """List all sessions, the last used first."""
    _, tenant = await asker(request)
    with tenant.use():
        files = [entry for entry in await sym.aio.kv_list(tenant.sessions) if entry.name.endswith(_SUFFIX)]
        files = [entry for entry in files if not entry.name.startswith(".")]
        modified_s = await anyio.to_thread.run_sync(_modified_s, tenant, [entry.name for entry in files])
        found: list[dict[str, Any]] = [
            {
                "name": await tenant.name_of(entry.name.removesuffix(_SUFFIX)),
                "tokens": entry.tokens,
                "size": entry.size,
                "modified": modified_s[entry.name],
            }
            for entry in files
            if entry.name in modified_s
        ]
    return Json({"sessions": sorted(found, key=lambda each: -each["modified"])})


def _modified_s(tenant: Tenant, names: list[str]) -> dict[str, float]:
    """Return the time of each file's last write, without files that were just removed."""
    found = {}
    with tenant.place.opened("sessions") as directory:
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
    return found


async def session(request: Request, more: str = "") -> Response:
    """Return the messages in a session's file. `more` is the rest of the name, after the part in the route."""
    tenant, name = await _named(request)
    name += more
    with tenant.use():
        async with tenant.up_to_last_turn(tenant.session(name).path) as kv:
            tokens, _ = await sym.aio.kv_read(kv)
        text = await sym.aio.detokenize(tokens) if tokens else ""
    gateway: Gateway = request.app.state.gateway
    return Json({"name": name, "tokens": len(tokens), "messages": await gateway.prompts.said(text)})


async def fork_session(request: Request) -> Response:
    """Fork a session, as `cp` does. Both sessions then continue separately."""
    tenant, name = await _named(request)
    to = (await request.app.state.gateway.fields_of(request, tenant)).required("to")
    if not isinstance(to, str):
        raise ApiError(400, "to is no text: the fork's name is expected", param="to")
    with tenant.use():
        async with tenant.up_to_last_turn(tenant.session(name).path) as kv:
            fork = tenant.session(to)
            await sym.aio.kv_close(await sym.aio.kv_fork(kv, fork.path))
            await tenant.tell_name(fork.path, fork)
    return Json({"name": to})


async def undo_session(request: Request) -> Response:
    """Cut off the last question and its answer."""
    tenant, name = await _named(request)
    with tenant.use():
        async with tenant.talking(tenant.session(name).path) as (kv, before):
            await sym.aio.Chat(kv).undo()
            after = (await sym.aio.kv_stat(kv)).tokens
    return Json({"tokens": after, "removed": (before or 0) - after})


async def remove_session(request: Request) -> Response:
    tenant, name = await _named(request)
    with tenant.use():
        async with tenant.talking(tenant.session(name).path) as (kv, _):
            await sym.aio.kv_remove(kv)
    return Json({"name": name, "deleted": True})


class _Export(Response):
    """Response that sends an open file. A later answer to the conversation does not change the file."""

    def __init__(self, file: BinaryIO, num_bytes: int, name: str) -> None:
        self._file = file
        super().__init__(media_type="application/octet-stream")
        self.headers["content-length"] = str(num_bytes)
        disposition = f"filename*=utf-8''{quote(name)}" if quote(name) != name else f'filename="{name}"'
        self.headers["content-disposition"] = f"attachment; {disposition}"

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while part := await anyio.to_thread.run_sync(self._file.read, _PART_BYTES):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def export_session(request: Request) -> Response:
    """Send the KV image, as `cat FILE` on the mount prints it. Writing the image to a file on any mount with this model
    imports the conversation there.
    """
    if not request.scope["raw_path"].endswith(b"/export"):  # an encoded slash: "/export" is the end of a name
        return await session(request, "/export")
    tenant, name = await _named(request)
    snapshot = f".{secrets.token_hex(8)}.new"

    def opened() -> tuple[BinaryIO, int]:
        with tenant.place.opened("sessions") as directory:
            file = os.fdopen(open_file(snapshot, directory), "rb", buffering=0)
        try:
            return file, os.fstat(file.fileno()).st_size
        except OSError:
            file.close()
            raise

    with tenant.use():
        async with tenant.up_to_last_turn(tenant.session(name).path) as kv:
            await sym.aio.kv_close(await sym.aio.kv_fork(kv, f"{tenant.sessions}/{snapshot}"))
        try:
            file, num_bytes = await anyio.to_thread.run_sync(opened)
        finally:
            await sym.aio.kv_remove(f"{tenant.sessions}/{snapshot}")
    return _Export(file, num_bytes, f"{tenant.file_of(name)}{_SUFFIX}")


async def _named(request: Request) -> tuple[Tenant, str]:
    _, tenant = await asker(request)
    return tenant, request.path_params["name"]


async def live(request: Request) -> Response:
    """Return live metrics for the page. With keys, metrics of the whole machine would reveal other tenants' load."""
    gateway, tenant = await asker(request)
    own = {
        "model": gateway.model.name,
        "place": f"{tenant.place.mount}/{tenant.place.path}/sessions",
        "prompt_tokens": tenant.usage.num_prompt,
        "cached_tokens": tenant.usage.num_cached,
    }
    if tenant.name != LOCAL:
        return Json(own)
    stat = await sym.aio.daemon_stat()
    whole = {
        "running": gateway.admission.num_running,
        "waiting": gateway.admission.num_waiting,
        "steps": stat["num_steps"],
        "tokens": stat["num_tokens"],
        "calls_in_steps": stat["num_calls_in_steps"],
        "uptime_s": stat["uptime_s"],
        "kv_used_bytes": (stat["num_pages"] - stat["num_free_pages"]) * stat["page_bytes"],
        "kv_total_bytes": stat["num_pages"] * stat["page_bytes"],
    }
    return Json(own | whole)


routes = [
    Route("/sessions", sessions),
    Route("/sessions/{name:path}", remove_session, methods=["DELETE"]),
    Route("/sessions/{name:path}/fork", fork_session, methods=["POST"]),
    Route("/sessions/{name:path}/undo", undo_session, methods=["POST"]),
    Route("/sessions/{name:path}/export", export_session),
    Route("/sessions/{name:path}", session, methods=["GET"]),
    Route("/live", live),
]
