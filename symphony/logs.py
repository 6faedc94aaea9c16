"""The daemon's log: lines of text or of JSON on standard error, or entries of systemd's journal; so many of each kind.

What writes a line can often be had again and again by a program: a broken image that is closed in a loop, a connection
that speaks no protocol. So lines are limited by the place in the code that they come from, and by the kind of error
that they tell of: a burst, then a slow rate, and the next one that comes through says how many were left out.

Errors are not limited: they are defects of the daemon or its books, and of a thousand each may be another one.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from symphony.service.journal import JournalHandler, is_journals, subjects

BURST = 20
"""Lines of one kind that may come at once: a story can still be followed."""

RATE_PER_S = 0.5
"""And then: some hundred kilobytes a day of each kind, were it to go on for ever."""

_CONTROLS = {number: repr(chr(number))[1:-1] for number in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""As text has them, so that no terminal obeys."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(slots=True)
class _Kind:
    tokens: float
    filled_s: float
    num_left_out: int = 0


class RateLimit(logging.Filter):
    """For a handler; any thread may log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[object, ...], _Kind] = {}  # as many as there are in the code
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        with self._lock:
            now_s = self._clock()
            kind = self._kinds.setdefault(_kind_of(record), _Kind(BURST, now_s))
            kind.tokens = min(BURST, kind.tokens + (now_s - kind.filled_s) * RATE_PER_S)
            kind.filled_s = now_s
            if kind.tokens < 1:
                kind.num_left_out += 1
                return False
            kind.tokens -= 1
            num_left_out, kind.num_left_out = kind.num_left_out, 0
        if num_left_out:
            record.msg = f"{record.msg} ({num_left_out} lines like this were left out)"
        return True


def _kind_of(record: logging.LogRecord) -> tuple[object, ...]:
    """A disk that is full, which any user can bring about, must not hide one that dies: same place, other errno."""
    errors = [argument for argument in record.args or () if isinstance(argument, BaseException)]
    return record.pathname, record.lineno, *(getattr(error, "errno", None) or type(error) for error in errors)


def set_up_log(kind: str = "auto", *, verbose: bool = False) -> None:
    """Set the daemon's log up, or change it. `verbose`: everything, and all of it. SymError: there is no such log."""
    handler = _handler(kind)
    if not verbose:
        handler.addFilter(RateLimit())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)


def _handler(kind: str) -> logging.Handler:
    if kind == "journal" or (kind == "auto" and is_journals(sys.stderr)):
        return JournalHandler()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else TextLines(_TEXT))
    return handler


class TextLines(logging.Formatter):
    """One line, and the error's traceback. A name of a file that has lines of its own would else forge ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        record.message = record.message.translate(_CONTROLS)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; what the line is about; and the error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **subjects(record),
        }
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)
