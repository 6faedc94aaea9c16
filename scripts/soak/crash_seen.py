"""Contents of a directory on the mount: tokens of KV files, bytes of plain files."""

from __future__ import annotations

from pathlib import Path

from crash_model import KV, PLAIN, State

import libsym as sym


def seen_in(directory: Path, inside: str) -> dict[str, State]:
    """Read every file of a directory to its end. `inside` is the directory's path in programs."""
    found = {}
    for entry in sym.kv_list(inside):
        if entry.kind == KV:
            found[entry.name] = State(KV, tuple(sym.kv_read(f"{inside}/{entry.name}")[0]))
        else:
            found[entry.name] = State(PLAIN, tuple((directory / entry.name).read_bytes()))
    return found
