"""Exit statuses of `symphony run` that are not the program's own: limits, signals, and failures of Symphony."""

from __future__ import annotations

LOST = 119
"""Status of a command whose program runs on another machine that does not answer any more."""
OUT_OF_MEMORY = 120
OUT_OF_TOKENS = 121
OUT_OF_PAGES = 122
TOO_MANY_PROCESSES = 123
OUT_OF_TIME = 124
"""Status of a program that exceeded its time limit, as in timeout(1)."""
FAILED = 125
"""Status of Symphony's own failures: there is no daemon, or the request is refused."""
NOT_READABLE = 126
NOT_FOUND = 127
SIGNALLED = 128
"""Base for a program that a signal ended: the program's status is this number plus the signal's number."""
