"""The first program of the README, which here also prints facts about its surroundings."""

from __future__ import annotations

import os
from pathlib import Path

import libsym as sym

text = sym.Detokenizer()
with sym.kv_create() as kv:
    tokens = sym.chat_tokens([{"role": "user", "content": "Why is the sky blue?"}])
    for _ in range(8):
        token = sym.pred(kv, tokens).argmax()
        sym.send_to_user(text.add(token))
        tokens = [token]
sym.send_to_user(text.flush() + "\n")
status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
print(f"uid {os.getuid()}, pid {os.getpid()}, seccomp {status['Seccomp']}, {len(list(Path('/').iterdir()))} names in /")
