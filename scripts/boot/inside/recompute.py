"""Checks that this daemon computes the same K and V that the KV files contain: recompute.py FILE..."""

from __future__ import annotations

import sys
from pathlib import Path

import libsym as sym


def main() -> int:
    mount = Path(sym.daemon_stat()["mount"])
    for name in sys.argv[1:]:
        with sym.kv_create(f"{name}.again") as kv:
            sym.kv_write(kv, sym.kv_read(name)[0])
        same = (mount / f"{name}.again").read_bytes() == (mount / name).read_bytes()
        sym.kv_remove(f"{name}.again")
        if not same:
            print(f"{name}: other numbers")
            return 1
    print(f"{len(sys.argv) - 1} computed again: the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
