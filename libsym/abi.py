"""Numbers and structures of `abi.h` for Python: the system-call boundary that programs and the daemon share.

To add an operation, a flag, a limit or a structure, edit `abi.h` alone: each build writes `libsym/_abi.py` anew.
PAGE_ENTRIES comes from `steps.h`.
"""

from __future__ import annotations

from libsym._abi import *  # noqa: F403 - this module is for all names of that one
from libsym._abi import REPLY_STRUCT, REQUEST_STRUCT

HEADER_BYTES = REQUEST_STRUCT.size
"""Size of the header in front of the payload of a request or a reply."""
assert REPLY_STRUCT.size == HEADER_BYTES
