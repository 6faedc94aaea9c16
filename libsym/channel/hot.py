"""The addresses of what a loop over steps does with connections and samplers, for other extension modules to call."""

from __future__ import annotations

from typing import Any

from libsym._channel import ffi, lib

HOOKS = {
    "push": "sym_server_push_now",
    "take": "sym_server_take_hot",
    "answer": "sym_server_answer_hot",
    "watch": "sym_server_watch",
    "unwatch": "sym_server_unwatch",
    "draw": "sym_sampler_draw",
    "note": "sym_sampler_note",
}


def address(pointer: Any) -> int:
    """Of something that lives in `libsym._channel`; it is the caller's to keep alive."""
    return int(ffi.cast("uintptr_t", pointer))


def hook_addresses() -> dict[str, int]:
    """By the names that `scheduler/loop.h` gives them."""
    return {name: address(ffi.addressof(lib, function)) for name, function in HOOKS.items()}
