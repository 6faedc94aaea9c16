"""Errors of requests, and their form in each interface."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import libsym as sym

log = logging.getLogger(__name__)
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STATUSES = {
    errno.EINVAL: 400,
    errno.E2BIG: 413,
    errno.EMSGSIZE: 413,
    errno.ENOENT: 404,
    errno.EEXIST: 409,
    errno.EACCES: 403,
    errno.EPERM: 403,
    errno.EXDEV: 403,
    errno.EISDIR: 400,
    errno.ENOTDIR: 400,
    errno.ENAMETOOLONG: 400,
    errno.EAGAIN: 429,
    errno.EDQUOT: 429,
    errno.ENOSPC: 503,
    errno.ENOBUFS: 503,
    errno.ENOTCONN: 503,
    errno.ETIMEDOUT: 408,
}
_SOON_S = 1.0
_AWAY = {errno.ENOTCONN: "the model is away: try again"}
_NO_ROOM = "there is no room for this now: try again"


class ApiError(Exception):
    """Refusal of a request: an HTTP status, and a message that names the field and its value."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = _KINDS.get(status, "api_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def from_system(error: OSError) -> ApiError:
    """Return an error of the daemon or of a file as an ApiError, with the status that fits its errno."""
    status = STATUSES.get(error.errno or 0, 500)
    if status == 503:  # the error's own text has paths and limits, which only the log may show
        log.warning("status 503: %s", error)
        return ApiError(status, _AWAY.get(error.errno or 0, _NO_ROOM), retry_after_s=_SOON_S)
    said = str(error) if isinstance(error, sym.SymError) else str(error.strerror)
    if error.errno == errno.EDQUOT:  # waiting does not help: the client must remove some of its files
        return ApiError(status, said, code="insufficient_quota")
    return ApiError(status, said, retry_after_s=_SOON_S if status == 429 else None)


def openai_form(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def ollama_form(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def anthropic_form(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


_FORMS = {"/v1/messages": anthropic_form, "/api/": ollama_form}


def form_at(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """Return the function that formats errors for the interface at a path."""
    return next((form for start, form in _FORMS.items() if path.startswith(start)), openai_form)
