"""Addresses of C functions on connections and samplers, for the run in another extension module."""

from __future__ import annotations

from typing import Any

from libsym._channel import ffi, lib


def address(pointer: Any) -> int:
    """Return the address of an object of `libsym._channel`. The caller keeps the object alive."""
    return int(ffi.cast("uintptr_t", pointer))


HOT_FUNCTIONS = address(lib.sym_hot())
"""Address of a `sym_hot_functions` (`steps.h`)."""
