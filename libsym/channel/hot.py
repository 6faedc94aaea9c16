"""What a loop over steps does with connections and samplers: the addresses, for another extension module to call."""

from __future__ import annotations

from typing import Any

from libsym._channel import ffi, lib


def address(pointer: Any) -> int:
    """Of something that lives in `libsym._channel`; it is the caller's to keep alive."""
    return int(ffi.cast("uintptr_t", pointer))


HOT_FUNCTIONS = address(lib.sym_hot())
"""A `sym_hot_functions` of `steps.h`."""
