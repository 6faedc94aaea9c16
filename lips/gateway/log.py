"""The log: a line a request, and what else there is to say, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)
FORMS = ("text", "json")
_SHOWN = 200
_NEVER = 499
"""Status of a request whose client went before it had any."""


@dataclass(slots=True)
class Seen:
    """A request, as the log tells of it."""

    method: str
    path: str
    status: int = _NEVER
    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    first_s: float | None = None
    """Seconds to the first token; None: nothing was generated."""
    is_gone: bool = False
    """Its client went before the end of the answer."""
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Seen:
        """As it was sent, with the escapes of its path: nobody forges a line."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace")
        return cls(scope["method"], path[:_SHOWN])

    def begin(self) -> None:
        """A generation has its first token."""
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began_s

    def tell(self) -> None:
        """Write the line."""
        log.info("%s", self, extra={"fields": self._fields()})

    def _fields(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "completion_tokens": self.num_completion,
            "first_token_s": None if self.first_s is None else round(self.first_s, 6),
            "total_s": round(time.monotonic() - self.began_s, 6),
        }

    def __str__(self) -> str:
        said = f"{self.method} {self.path} {self.status}"
        if self.first_s is not None:
            said += f" in {self.num_prompt} cached {self.num_cached} out {self.num_completion}"
            said += f" first {self.first_s:.3f} s"
        return f"{said} total {time.monotonic() - self.began_s:.3f} s"


SEEN: ContextVar[Seen] = ContextVar("seen")
"""The request that a task works for."""


class _Json(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {"time": record.created, "level": record.levelname.lower()}
        told |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_up(form: str) -> None:
    """Send the gateway's lines, and warnings of libraries, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("gateway: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("lips.gateway").setLevel(logging.INFO)
