"""What POST /v1/responses keeps: for each response a KV file, and beside it what was said, as JSON.

/kv/gateway/local/responses/resp_…kv      what the next response goes on from
/kv/gateway/local/responses/resp_…json    the response, and all items before it
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.tenants import Tenant

KEPT_S = 7 * 24 * 3600.0
UNDER_WAY = ("queued", "in_progress")
"""What a response is before it has ended."""
_ID = re.compile(r"resp_[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, and what led to it."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """All of the conversation but the response's own output."""


def kv_path(tenant: Tenant, response_id: str) -> str:
    return f"{tenant.responses}/{checked(response_id)}.kv"


def checked(response_id: str) -> str:
    if not _ID.fullmatch(response_id):
        raise _unknown(response_id)
    return response_id


def _json_path(tenant: Tenant, response_id: str) -> Path:
    return tenant.place / "responses" / f"{checked(response_id)}.json"


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id[:60]}", param="previous_response_id", code="not_found")


async def load(tenant: Tenant, response_id: str) -> Stored:
    path = _json_path(tenant, response_id)
    try:
        text = await anyio.to_thread.run_sync(path.read_bytes)
    except FileNotFoundError:
        raise _unknown(response_id) from None
    found = json.loads(text)
    return Stored(found["response"], found["items"])


async def save(tenant: Tenant, stored: Stored) -> None:
    """Whole or not at all. Both files go when nobody has wanted the KV for long."""
    path = _json_path(tenant, stored.response["id"])
    text = json.dumps({"response": stored.response, "items": stored.items}, ensure_ascii=False).encode(errors="replace")

    def write() -> None:
        new = path.with_suffix(".new")
        try:
            new.write_bytes(text)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    await anyio.to_thread.run_sync(write)


async def sweep(tenant: Tenant) -> None:
    """What is older than responses are kept, and whose KV has gone, goes too; so does what was left half made."""
    oldest_s = time.time() - KEPT_S

    def remove_old() -> None:
        for path in (tenant.place / "responses").glob("resp_*.json"):
            if path.stat().st_mtime < oldest_s and not path.with_suffix(".kv").exists():
                path.unlink()
        for path in (tenant.place / "responses").glob("resp_*.kv"):
            if path.stat().st_mtime < oldest_s and not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)
        for path in (tenant.place / "cached").glob("*.kv"):
            if path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)
        for path in [*(tenant.place / "responses").glob("*.new"), *(tenant.place / "sessions").glob(".*.new")]:
            if path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)

    await anyio.to_thread.run_sync(remove_old)


async def remove(tenant: Tenant, response_id: str) -> None:
    path = _json_path(tenant, response_id)
    try:
        await anyio.to_thread.run_sync(path.unlink)
    except FileNotFoundError:
        raise _unknown(response_id) from None
    await remove_kv(tenant, response_id)


async def remove_kv(tenant: Tenant, response_id: str) -> None:
    """If it is there: it may have gone by itself."""
    with tenant.use(), suppress(sym.NotFound):
        await sym.aio.kv_remove(kv_path(tenant, response_id))


def error_form(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}
