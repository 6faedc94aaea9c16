#!/usr/bin/env python3
"""Draws the README's pictures, for light and dark pages: the packages as the tree has them, and a terminal session.

.venv/bin/python scripts/pictures/draw.py               # after a room or an import between packages has changed
.venv/bin/python scripts/pictures/draw.py --record      # first runs the commands of terminal.py again (as root)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import house
import terminal
from svg import THEMES


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the README's pictures.")
    parser.add_argument(
        "--record", action="store_true", help="record the terminal anew, with a daemon on /kv (as root)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="output (default: beside this)")
    args = parser.parse_args()
    if args.record:
        terminal.record()
    for picture in (house, terminal):
        for theme in THEMES:
            path = args.out / f"{picture.__name__}-{theme.name}.svg"
            path.write_text(str(picture.draw(theme)), encoding="utf-8")


if __name__ == "__main__":
    main()
