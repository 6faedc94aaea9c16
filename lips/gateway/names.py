"""Which conversation a request is about, as the name of a file."""

from __future__ import annotations

import re

from starlette.requests import Request

from lips.gateway.fields import Fields
from lips.gateway.tenants import Tenant

_HEADERS = ("x-session-id", "session_id", "session-id")
_OF_CLAUDE = re.compile(r"session_([0-9a-fA-F-]{8,64})")
_NO_NAME = re.compile(r"[^A-Za-z0-9._@+=-]+")


def conversation_of(fields: Fields) -> str | None:
    """The conversation that the messages of a request go on with: what was said before is in its file."""
    value = fields.body.get("conversation")
    if value is None or isinstance(value, str):
        return value or None
    found = value.get("id") if isinstance(value, dict) else None
    if not isinstance(found, str) or not found:
        raise fields.wrong("conversation", "a name, or an object with an id")
    return found


def session_of(request: Request, fields: Fields) -> str | None:
    """The name that a client gives to the conversation that it sends as a whole, as the name of a file."""
    metadata = fields.child("metadata")
    candidates = [fields.body.get("session_id"), fields.body.get("prompt_cache_key")]
    candidates += [request.headers.get(name) for name in _HEADERS]
    if metadata is not None:
        candidates.append(metadata.body.get("session_id"))
        if match := _OF_CLAUDE.search(str(metadata.body.get("user_id", ""))):
            candidates.append(match[1])
    for each in candidates:
        if isinstance(each, str) and (name := _NO_NAME.sub("-", each).strip(".-")[:100]):
            return name
    return None


def session_path(tenant: Tenant, request: Request, fields: Fields) -> str | None:
    """The file of the conversation that a request goes on with, or that it is sent for as a whole."""
    name = conversation_of(fields) or session_of(request, fields)
    return None if name is None else tenant.session_path(name)
