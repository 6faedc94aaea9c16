"""A program without end: it makes KV files and plain files, syncs them, and records each synced file in a log.

    load.py DIRECTORY LOG    the program's user owns both; DIRECTORY is on the mount, named as programs name files

Each line of the log names a file that must exist from that time on. If the daemon goes away, the program waits and then
restarts itself.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from pathlib import Path

import libsym as sym

PAUSE_S = 0.03
"""Pause between files, so that other processes can run."""
RETRY_S = 0.05
"""Time between two attempts to reach the daemon."""


def work(directory: str, log: int) -> None:
    draw = random.Random()
    mount = Path(sym.daemon_stat()["mount"])
    while True:
        number = time.time_ns()
        name = f"{directory}/{number}.kv"
        tokens = [draw.randrange(1, 200) for _ in range(draw.choice((3, 20, 90)))]
        with sym.kv_create(name) as kv:
            sym.pred(kv, tokens)
            generated = list(sym.generate(kv, [7], stop_at_end=False, max_tokens=5))
            tokens = sym.kv_read(kv)[0]
            assert len(tokens) > len(generated)
            sym.kv_sync(kv)
        tell(log, {"name": name, "tokens": list(tokens), "at_s": time.time()})
        time.sleep(PAUSE_S)
        name = f"{directory}/{number}.txt"
        text = f"{number} " * draw.choice((1, 500, 5_000))
        with (mount / name).open("w") as plain:
            plain.write(text)
            plain.flush()
            os.fsync(plain.fileno())
        tell(log, {"name": name, "text": text, "at_s": time.time()})


def tell(log: int, words: dict[str, object]) -> None:
    os.write(log, json.dumps(words).encode() + b"\n")


def main() -> None:
    directory, path = sys.argv[1:]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        work(directory, log)
    except OSError as error:  # from the channel or the mount
        print(f"{time.time():.3f} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        select.select([], [], [], RETRY_S)
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
