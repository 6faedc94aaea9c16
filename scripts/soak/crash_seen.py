"""What is in a directory of the mount: the tokens of its KV files, the bytes of the others."""

from __future__ import annotations

from pathlib import Path

from crash_model import KV, PLAIN, State

import libsym as sym


def seen_in(directory: Path, inside: str) -> dict[str, State]:
    """Every file, read to its end. `inside`: the directory as programs call it."""
    found = {}
    for entry in sym.kv_list(inside):
        if entry.kind == KV:
            found[entry.name] = State(KV, tuple(sym.kv_read(f"{inside}/{entry.name}")[0]))
        else:
            found[entry.name] = State(PLAIN, tuple((directory / entry.name).read_bytes()))
    return found
