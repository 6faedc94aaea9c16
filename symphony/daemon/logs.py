"""The daemon's log: text or JSON on standard error, or entries of systemd's journal, with a rate limit.

A program can often cause a line again and again: it closes a broken image in a loop, or connects and breaks the
protocol. So the log accepts a burst of each kind of line, then a slow rate. A kind is a place in the code, together
with the errno or type of the error that the line reports. The next line that passes says how many lines of its kind
were left out.

Lines of level ERROR have no limit: such lines report defects of the daemon or its books, and two of them may report
different defects.
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
"""Number of lines of one kind in a burst: enough to follow a course of events."""

RATE_PER_S = 0.5
"""Number of lines of one kind in a second, after the burst. Lines of 100 bytes then make 4 MB a day."""

_CONTROLS = {number: repr(chr(number))[1:-1] for number in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""Escapes for control characters, so that no terminal interprets them."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(slots=True)
class _Kind:
    tokens: float
    filled_s: float
    num_left_out: int = 0


class RateLimit(logging.Filter):
    """Logging filter with a rate limit (a token bucket) for each kind of line. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # At most one kind for each pair of a place in the code and an errno or type of error.
        self._kinds: dict[tuple[object, ...], _Kind] = {}
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
    """Return the kind of a line: its place in the code, and the errno or type of the errors that it reports.
    Any user can cause errors of a full disk. Their errno differs from that of a failing disk, so lines on the full disk
    don't suppress lines on the failing disk.
    """
    errors = [argument for argument in record.args or () if isinstance(argument, BaseException)]
    return record.pathname, record.lineno, *(getattr(error, "errno", None) or type(error) for error in errors)


def set_up_log(kind: str = "auto", *, verbose: bool = False) -> None:
    """Set up the daemon's log, or change it. SymError: there is no log of that kind.
    `verbose`: write debug lines too, without a rate limit.
    """
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
    """Formatter that writes a line of text, and the error's traceback below it.
    Control characters are escaped. Else the name of a file could forge lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        record.message = record.message.translate(_CONTROLS)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """Formatter that writes one JSON object a line: time (UTC), level, logger, message, subjects and traceback."""

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
