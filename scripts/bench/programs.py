#!/usr/bin/env python3
"""The figures that the programs of lips/ claim: steps saved, tokens not computed, watermarks found, perplexities.

    .venv/bin/python scripts/bench/programs.py [--only speculation] [--json FILE]

Starts a daemon of its own with SmolLM2 and runs the modules of scripts/bench/figures, one after the other. Figures are
counts and qualities, which the machine's load does not change; where a row is a time, it says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import libsym as sym  # noqa: E402 - the path comes first
from scripts.bench import figures  # noqa: E402
from scripts.bench.launches import processor  # noqa: E402

MODULES = sorted(module.name for module in pkgutil.iter_modules(figures.__path__))


@contextmanager
def daemon(model: str) -> Iterator[None]:
    """A daemon of this command's own, to which this process and the programs that it starts are connected."""
    with tempfile.TemporaryDirectory(prefix="figures") as directory:
        base = Path(directory)
        (base / "run").mkdir(mode=0o700)
        os.environ |= {"SYMPHONY_SOCKET": str(base / "s"), "XDG_RUNTIME_DIR": str(base / "run")}
        os.environ |= {"PYTHONPATH": str(ROOT)}
        options = ["--model", model, "--mount", base / "kv", "--state", base / "state", "--kv-memory", "1G"]
        command = [sys.executable, "-m", "symphony", "serve", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("symphony: "), "the daemon did not start"
                yield
            finally:
                sym.close()
                process.send_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=MODULES, help="this family alone (may be given again)")
    parser.add_argument("--model", default="smollm2", help="as for symphony serve (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(f"{processor()}, model {args.model}")
    with daemon(args.model):
        for name in args.only or MODULES:
            begin_s = time.monotonic()
            for row in importlib.import_module(f"scripts.bench.figures.{name}").measure():
                beside = "" if row.baseline is None else f"   (without: {row.baseline:.4g})"
                print(f"{row.program:14} {row.what:60} {row.value:10.4g} {row.unit}{beside}", flush=True)
                rows.append(asdict(row))
            print(f"    {name}: {time.monotonic() - begin_s:.0f} s")
    if args.json:
        args.json.write_text(json.dumps({"processor": processor(), "model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
