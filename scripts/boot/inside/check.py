"""Checks the files that `load.py` recorded as synced: each must exist with its whole content.

check.py LOG...    prints the number of files, and the longest time between two syncs
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import libsym as sym


def is_there(said: dict[str, object], mount: Path) -> bool:
    name = str(said["name"])
    if "text" in said:
        return (mount / name).read_text() == said["text"]
    return list(sym.kv_read(name)[0]) == said["tokens"]


def main() -> int:
    mount = Path(sym.daemon_stat()["mount"])
    said = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    lost = []
    for each in said:
        try:
            held = is_there(each, mount)
        except OSError as error:
            held = False
            print(f"{each['name']}: {error}")
        lost += [] if held else [each["name"]]
    times_s = sorted(each["at_s"] for each in said)
    pause_s = max((after - before for before, after in pairwise(times_s)), default=0.0)
    print(f"{len(said)} files synced, {len(lost)} lost, longest pause {pause_s:.1f} s")
    return 1 if lost or not said else 0


if __name__ == "__main__":
    sys.exit(main())
