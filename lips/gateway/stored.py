"""Files of POST /v1/responses: for each response a KV file, and the conversation as JSON.

/kv/gateway-UID/local/responses/resp_…kv      the KV that the next response continues
/kv/gateway-UID/local/responses/resp_…json    the response, and all items before it
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import anyio

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.places import open_file
from lips.gateway.tenants import Tenant

KEPT_S = 7 * 24 * 3600.0
UNDER_WAY = ("queued", "in_progress")
"""Statuses of a response that has not ended."""
_SWEPT = {"responses": (".json", ".kv", ".new"), "cached": (".kv",), "sessions": (".new",)}
"""Suffixes of the old files that a sweep removes, by directory. In `responses`, a sweep removes only files without
their counterpart."""
_OTHER = {".json": ".kv", ".kv": ".json"}
_ID = re.compile(r"resp_[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with the conversation before it."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Items of the conversation, without the output of the response."""


def kv_path(tenant: Tenant, response_id: str) -> str:
    return f"{tenant.responses}/{checked(response_id)}.kv"


def checked(response_id: str) -> str:
    if not _ID.fullmatch(response_id):
        raise _unknown(response_id)
    return response_id


def _json_name(response_id: str) -> str:
    return f"{checked(response_id)}.json"


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id[:60]}", param="previous_response_id", code="not_found")


async def load(tenant: Tenant, response_id: str) -> Stored:
    name = _json_name(response_id)

    def read() -> bytes:
        with tenant.place.file("responses", name) as file:
            return file.read()

    try:
        text = await anyio.to_thread.run_sync(read)
    except FileNotFoundError:
        raise _unknown(response_id) from None
    found = json.loads(text)
    return Stored(found["response"], found["items"])


async def save(tenant: Tenant, stored: Stored) -> None:
    """Write a response's JSON atomically. A sweep removes the JSON after the KV file beside it has expired."""
    name = _json_name(stored.response["id"])
    text = json.dumps({"response": stored.response, "items": stored.items}, ensure_ascii=False).encode(errors="replace")

    def write() -> None:
        new = f"{name}.{secrets.token_hex(4)}.new"
        with tenant.place.opened("responses") as directory:
            fd = open_file(new, directory, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(text)
                os.replace(new, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.unlink(new, dir_fd=directory)
                raise

    await anyio.to_thread.run_sync(write)


async def sweep(tenant: Tenant) -> None:
    """Remove old files: response files without counterpart, KV of the prompt cache, and unfinished files."""
    await anyio.to_thread.run_sync(_remove_old, tenant)


def _remove_old(tenant: Tenant) -> None:
    oldest_s = time.time() - KEPT_S
    for place, suffixes in _SWEPT.items():
        with tenant.place.opened(place) as directory, os.scandir(directory) as entries:
            names = {each.name for each in entries}
            for path in map(PurePath, names):
                has_other = place == "responses" and path.stem + _OTHER.get(path.suffix, "/") in names
                if has_other or path.suffix not in suffixes:
                    continue
                with suppress(FileNotFoundError):
                    about = os.stat(path, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and about.st_mtime < oldest_s:
                        os.unlink(path, dir_fd=directory)


async def remove(tenant: Tenant, response_id: str) -> None:
    name = _json_name(response_id)

    def unlink() -> None:
        with tenant.place.opened("responses") as directory:
            os.unlink(name, dir_fd=directory)

    try:
        await anyio.to_thread.run_sync(unlink)
    except FileNotFoundError:
        raise _unknown(response_id) from None
    await remove_kv(tenant, response_id)


async def remove_kv(tenant: Tenant, response_id: str) -> None:
    """Remove a response's KV file, unless it has expired already."""
    with tenant.use(), suppress(sym.NotFound):
        await sym.aio.kv_remove(kv_path(tenant, response_id))


def error_form(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}
