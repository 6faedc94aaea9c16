"""What both sides of the system-call boundary share: `abi.h` says it, and abi_build.py has Python say the same.

An operation, a flag, a limit or a structure is added there alone: each build writes `libsym/_abi.py` anew. PAGE_ENTRIES
comes with them, of `steps.h`.
"""

from __future__ import annotations

from libsym._abi import *  # noqa: F403 - it is all of them, and nothing else
from libsym._abi import REPLY_STRUCT, REQUEST_STRUCT

HEADER_BYTES = REQUEST_STRUCT.size
"""Of a request and of a reply, in front of the payload."""
assert REPLY_STRUCT.size == HEADER_BYTES
