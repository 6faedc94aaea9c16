"""A program without end: twice a second it computes three tokens and prints a line."""

from __future__ import annotations

import itertools
import time

import libsym as sym

for number in itertools.count():
    with sym.kv_create() as kv:
        print(f"beat {number}: {list(sym.generate(kv, [7], stop_at_end=False, max_tokens=3))}", flush=True)
    time.sleep(0.5)
