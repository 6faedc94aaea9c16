"""Names of conversations: finds the conversation of a request and its file."""

from __future__ import annotations

import re

from starlette.requests import Request

from lips.gateway.fields import Fields
from lips.gateway.file_names import file_name
from lips.gateway.tenants import Session, Tenant

_HEADERS = ("x-session-id", "session_id", "session-id")
_OF_CLAUDE = re.compile(r"session_([0-9a-fA-F-]{8,64})")


def conversation_of(fields: Fields) -> str | None:
    """Return the name of the conversation that a request continues. The earlier messages are in its file."""
    value = fields.body.get("conversation")
    if value is None or isinstance(value, str):
        return value or None
    found = value.get("id") if isinstance(value, dict) else None
    if not isinstance(found, str) or not found:
        raise fields.wrong("conversation", "a name, or an object with an id")
    return found


def _session_of(request: Request, fields: Fields) -> str | None:
    """Return the client's name for a conversation that its request contains as a whole."""
    metadata = fields.child("metadata")
    candidates = [fields.text("session_id")]
    candidates += [request.headers.get(name) for name in _HEADERS]
    if metadata is not None:
        candidates.append(metadata.body.get("session_id"))
        if match := _OF_CLAUDE.search(str(metadata.body.get("user_id", ""))):
            candidates.append(match[1])
    return next((each for each in candidates if isinstance(each, str) and each), None)


def session_for(tenant: Tenant, request: Request, fields: Fields) -> Session | None:
    """Return the file of the conversation that a request continues or contains.

    Without a conversation, return the file of its prompt cache key, which is in a separate directory. None: the request
    has neither.
    """
    name = conversation_of(fields) or _session_of(request, fields)
    if name is not None:
        return tenant.session(name)
    key = fields.text("prompt_cache_key")
    return Session(f"{tenant.cached}/{file_name(key)}.kv") if key else None
