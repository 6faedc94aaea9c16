"""Bindings of the kernel's requests to handlers. Other modules import pyfuse3 from here.

`shim.c` explains the mechanism. When pyfuse3 is loaded, the dynamic linker binds its `fuse_session_new` to the first
library that exports this name. So this module loads the shim before pyfuse3, and all other modules import pyfuse3 from
this module.

A process has at most one mount, because pyfuse3's session and the callbacks from C are globals.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

assert "pyfuse3" not in sys.modules, (
    "pyfuse3 was imported before kvfs.mount.shim: say `from kvfs.mount.shim import pyfuse3`"
)

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    from kvfs._shim import ffi, lib
finally:
    sys.setdlopenflags(_flags)

import pyfuse3 as pyfuse3  # noqa: E402, PLC0414 - after the shim; `as` marks it as exported

if _missing := lib.kvfs_find_libfuse(os.fsencode(pyfuse3.__file__)):
    raise ImportError(ffi.string(_missing).decode(), name="pyfuse3")

LATER: int = lib.ANSWER_LATER
"""Result of a callback whose answer comes later, by `answer`."""

out: memoryview = memoryview(ffi.buffer(lib.kvfs_out, lib.OUT_BYTES))
"""Buffer that all answers share. A handler packs its answer into the buffer directly before the answer is sent."""

answer: Callable[[Any, int], None] = lib.kvfs_answer
"""Answer a request whose callback returned LATER. The status is what the callback would have returned. Each request is
answered once.
"""

watch: Callable[[Any], None] = lib.kvfs_watch
"""Have C call `interrupted` with the request when the process that waits for the answer gets a signal."""

uid: Callable[[Any], int] = lib.kvfs_uid
"""Return the uid of the process that made a request."""

withdraw: Callable[[int], int] = lib.kvfs_withdraw
"""Have the kernel ask again for the attributes of an inode. Return 0, or a negative errno: see `kvfs.mount.grants`."""

LINGER_NS: int = lib.kvfs_linger_ns


def linger(wanted: bool) -> None:
    """Set whether the loop polls for the next request for a moment, or yields the processor at once."""
    lib.kvfs_linger_ns = LINGER_NS if wanted else 0


_kept: list[object] = [None]


def send(data: bytes | memoryview) -> int:
    """Set the bytes of the answer, and return the answer's status. The bytes must not change before the answer is
    sent.
    """
    _kept[0] = pointer = ffi.from_buffer(data)
    lib.kvfs_data = pointer
    lib.kvfs_data_bytes = len(data)
    return int(lib.ANSWER_DATA)


def bind(name: str, callback: Callable[..., int]) -> None:
    """Have C call `callback` for one kind of request. The callback must not raise."""
    ffi.def_extern(name=f"kvfs_{name}", error=-errno.EIO)(callback)


def bind_silent(name: str, callback: Callable[..., None]) -> None:
    """Have C call `callback` for a kind of request that has no answer. The callback must not raise."""
    ffi.def_extern(name=f"kvfs_{name}")(callback)


def text(pointer: Any) -> bytes:
    """Return a copy of a name. C reuses the memory of the name after the callback."""
    found: bytes = ffi.string(pointer)
    return found


def view(pointer: Any, size: int) -> memoryview:
    """Return bytes of a request without copying them. The bytes are valid only until the callback returns."""
    return memoryview(ffi.buffer(pointer, size))


def forget_session() -> None:
    """Forget the session. Call this before `pyfuse3.close`, and before `pyfuse3.init`, which makes a new session."""
    lib.kvfs_forget_session()


def verify() -> None:
    """Raise if `pyfuse3.init` made its session without the shim, because then no handler would ever be called."""
    if not lib.kvfs_session_captured():
        raise RuntimeError(
            "the FUSE session was made without kvfs._shim, because libfuse was bound before kvfs._shim was loaded; "
            "import kvfs.mount.shim before anything else that loads libfuse3"
        )
