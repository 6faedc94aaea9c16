"""A program that goes on for ever: three tokens and a line, twice a second."""

from __future__ import annotations

import itertools
import time

import libsym as sym

for number in itertools.count():
    with sym.kv_create() as kv:
        print(f"beat {number}: {list(sym.generate(kv, [7], stop_at_end=False, max_tokens=3))}", flush=True)
    time.sleep(0.5)
