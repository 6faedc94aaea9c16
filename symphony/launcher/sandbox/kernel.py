"""The extension module of the sandbox, and the check of its functions' results."""

from __future__ import annotations

import os

from symphony.launcher._kernel import ffi, lib

__all__ = ["done", "ffi", "lib"]


def done(result: int, what: str = "") -> int:
    """Return the result of a system call. OSError: the call failed."""
    if result < 0:
        code = ffi.errno
        raise OSError(code, os.strerror(code), what or None)
    return result
