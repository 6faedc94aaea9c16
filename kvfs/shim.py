"""Gives the mount copy_file_range, which pyfuse3 has no handler for; pyfuse3 itself is imported from here.

`shim.c` says how. Order matters because the dynamic linker binds pyfuse3's `fuse_session_new` when pyfuse3 is loaded,
to the first library that offers one: so one module loads both, and the rest says `from kvfs.shim import pyfuse3`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

assert "pyfuse3" not in sys.modules, "pyfuse3 was imported before kvfs.shim: say `from kvfs.shim import pyfuse3`"

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    from kvfs._shim import ffi, lib
finally:
    sys.setdlopenflags(_flags)

import pyfuse3 as pyfuse3  # noqa: E402, PLC0414 - only now; and `as` says that it is exported


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One copy_file_range(2), as the kernel passes it on. Answer it once, with `reply_count` or `reply_error`."""

    request: Any
    source: int
    """Handle, as every handle here from our own `open`."""
    source_offset: int
    target: int
    target_offset: int
    size: int

    def reply_count(self, count: int) -> None:
        """So many bytes were copied."""
        lib.fuse_reply_write(self.request, count)

    def reply_error(self, code: int) -> None:
        """It failed with this errno."""
        lib.fuse_reply_err(self.request, code)


_handler: Callable[[CopyRequest], None] | None = None  # one mount a process: pyfuse3's session is a global too


def attach(handler: Callable[[CopyRequest], None]) -> None:
    """Send requests to this handler, which must neither block nor raise. Before `pyfuse3.init`."""
    global _handler  # noqa: PLW0603 - C calls back without a place for a pointer of ours
    lib.kvfs_forget_session()
    _handler = handler


def verify() -> None:
    """Raise if `pyfuse3.init` made its session without us: `cp` would silently copy instead of forking."""
    if not lib.kvfs_session_captured():
        raise RuntimeError(
            "the FUSE session was made past kvfs._shim: libfuse was bound before it was loaded; "
            "import kvfs.shim before anything else that loads libfuse3"
        )


@ffi.def_extern()  # type: ignore[untyped-decorator] # cffi has no types
def kvfs_copy_file_range(request: Any, *fields: int) -> None:
    assert _handler is not None
    _handler(CopyRequest(request, *fields))
