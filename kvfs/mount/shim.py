"""Binds the kernel's requests to handlers; pyfuse3 itself is imported from here.

`shim.c` says how. Order matters because the dynamic linker binds pyfuse3's `fuse_session_new` when pyfuse3 is loaded,
to the first library that offers one: so one module loads both, and the rest says `from kvfs.mount.shim import pyfuse3`.

One mount a process: pyfuse3's session is a global, and so is what C calls.
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

import pyfuse3 as pyfuse3  # noqa: E402, PLC0414 - only now; and `as` says that it is exported

if _missing := lib.kvfs_find_libfuse(os.fsencode(pyfuse3.__file__)):
    raise ImportError(ffi.string(_missing).decode(), name="pyfuse3")

LATER: int = lib.ANSWER_LATER
"""What a callback returns when `answer` will be called."""

out: memoryview = memoryview(ffi.buffer(lib.kvfs_out, lib.OUT_BYTES))
"""Where an answer is packed, directly before it is given: there is one for all."""

answer: Callable[[Any, int], None] = lib.kvfs_answer
"""Answer a request later, with what its callback would have returned. Each is answered once."""

watch: Callable[[Any], None] = lib.kvfs_watch
"""From now on, call `interrupted` with the request when whoever waits for it gets a signal."""

uid: Callable[[Any], int] = lib.kvfs_uid
"""Who makes a request."""

LINGER_NS: int = lib.kvfs_linger_ns


def linger(wanted: bool) -> None:
    """Whether to look for the next request for a moment, or to leave the processor to others at once."""
    lib.kvfs_linger_ns = LINGER_NS if wanted else 0


_kept: list[object] = [None]


def send(data: bytes | memoryview) -> int:
    """Answer with these bytes, which must not change before the answer is given."""
    _kept[0] = pointer = ffi.from_buffer(data)
    lib.kvfs_data = pointer
    lib.kvfs_data_bytes = len(data)
    return int(lib.ANSWER_DATA)


def bind(name: str, callback: Callable[..., int]) -> None:
    """Let C call this for one kind of request. It must not raise."""
    ffi.def_extern(name=f"kvfs_{name}", error=-errno.EIO)(callback)


def bind_silent(name: str, callback: Callable[..., None]) -> None:
    """The same for what has no answer."""
    ffi.def_extern(name=f"kvfs_{name}")(callback)


def text(pointer: Any) -> bytes:
    """A name, copied: C's memory is used again after the callback."""
    found: bytes = ffi.string(pointer)
    return found


def view(pointer: Any, size: int) -> memoryview:
    """Bytes of the request, without a copy: only until its callback returns."""
    return memoryview(ffi.buffer(pointer, size))


def expect_session() -> None:
    """The next `pyfuse3.init` is to make its session through us."""
    lib.kvfs_forget_session()


def verify() -> None:
    """Raise if `pyfuse3.init` made its session without us: nothing of ours would be called."""
    if not lib.kvfs_session_captured():
        raise RuntimeError(
            "the FUSE session was made past kvfs._shim: libfuse was bound before it was loaded; "
            "import kvfs.mount.shim before anything else that loads libfuse3"
        )
