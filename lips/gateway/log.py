"""The log, as text or as JSON: a line for each request, and messages."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lips.gateway.usage import Usage

log = logging.getLogger(__name__)
FORMS = ("text", "json")
_SHOWN = 200
_NEVER = 499
"""Status of a request whose client disconnected before any answer."""


@dataclass(slots=True)
class LoggedRequest:
    """The facts of a request that the log shows."""

    method: str
    path: str
    status: int = _NEVER
    usage: Usage = field(default_factory=Usage)
    first_s: float | None = None
    """Seconds to the first token; None: no token was generated."""
    is_gone: bool = False
    """Whether the client disconnected before the end of the answer."""
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> LoggedRequest:
        """Return the facts of a request. Its path keeps its escapes, so that no client can forge a line of the log."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
        return cls(scope["method"], path[:_SHOWN])

    def begin(self) -> None:
        """Note the time of the first token."""
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began_s

    def tell(self) -> None:
        """Write the request's line to the log."""
        log.info("%s", self, extra={"fields": self._fields()})

    def _fields(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "prompt_tokens": self.usage.num_prompt,
            "cached_tokens": self.usage.num_cached,
            "completion_tokens": self.usage.num_completion,
            "first_token_s": None if self.first_s is None else round(self.first_s, 6),
            "total_s": round(time.monotonic() - self.began_s, 6),
        }

    def __str__(self) -> str:
        said = f"{self.method} {self.path} {self.status}"
        if self.first_s is not None:
            said += f" in {self.usage.num_prompt} cached {self.usage.num_cached} out {self.usage.num_completion}"
            said += f" first {self.first_s:.3f} s"
        return f"{said} total {time.monotonic() - self.began_s:.3f} s"


SEEN: ContextVar[LoggedRequest] = ContextVar("seen")
"""The request that the current task works for."""


class _Json(logging.Formatter):
    """Formatter that writes each record as a JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {"time": record.created, "level": record.levelname.lower()}
        told |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_up(form: str) -> None:
    """Send the gateway's log, and the warnings of libraries, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("gateway: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("lips.gateway").setLevel(logging.INFO)
