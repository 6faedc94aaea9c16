#!/usr/bin/env python3
"""Measure the figures of the programs in lips/: steps saved, tokens not computed, watermarks found, perplexities.

    .venv/bin/python scripts/bench/programs.py [--only speculation] [--quick] [--json]

The script starts a daemon with SmolLM2, and runs the modules of scripts/bench/figures one after the other. Figures are
counts and qualities, which do not depend on the machine's load. If the figure of a row is a time, the row says so.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import time
from dataclasses import asdict

import figures
from harness import arguments, chosen, connected, processor

MODULES = sorted(module.name for module in pkgutil.iter_modules(figures.__path__))


def main() -> None:
    only: tuple[list[str], str] = ([], f"this family alone, of {', '.join(MODULES)} (may be given again)")
    args = arguments(__doc__, only=only, model="smollm2", quick=(False, "one family"), json=False).parse_args()
    names = chosen(",".join(args.only or (["eviction"] if args.quick else MODULES)), MODULES)
    rows: list[dict[str, object]] = []
    print(f"{processor()}, model {args.model}")
    with connected(args.model, "--kv-memory", "1G") as daemon:
        os.environ |= daemon.environment  # for programs that the figures start
        for name in names:
            begin_s = time.monotonic()
            for row in importlib.import_module(f"figures.{name}").measure():
                beside = "" if row.baseline is None else f"   (without: {row.baseline:.4g})"
                print(f"{row.program:14} {row.what:60} {row.value:10.4g} {row.unit}{beside}", flush=True)
                rows.append(asdict(row))
            print(f"    {name}: {time.monotonic() - begin_s:.0f} s")
    if args.json:
        print(json.dumps({"processor": processor(), "model": args.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
