"""What `symphony run` ends with where the program's own status would say nothing."""

from __future__ import annotations

OUT_OF_MEMORY = 120
OUT_OF_TOKENS = 121
OUT_OF_PAGES = 122
TOO_MANY_PROCESSES = 123
OUT_OF_TIME = 124
"""As timeout(1) has it."""
FAILED = 125
"""Symphony itself: no daemon, refused."""
NOT_READABLE = 126
NOT_FOUND = 127
SIGNALLED = 128
"""And the signal's number."""
