"""`symphony` without a command: print a line on Symphony, whether a daemon runs, and commands for a beginner."""

from __future__ import annotations

import argparse

import libsym
from libsym.errors import SymError


def begin(_: argparse.Namespace) -> int:
    try:
        libsym.connect()
    except SymError as error:
        state, first = str(error), ("symphony serve", "start the daemon, in a terminal of its own")
    else:
        info = libsym.model_info()
        state = f"a daemon serves {info.name}; its KV files are in {info.mount}"
        first = ("symphony run chat", "talk with the model")
    commands = [
        first,
        ('symphony run ask "Who are you?"', "run a program"),
        ("symphony help tutorial", "learn the rest"),
    ]
    width = max(len(command) for command, _ in commands)
    print("Symphony: an operating system for LLM inference programs.")
    print(f"Now: {state}\n")
    print("\n".join(f"  {command:{width}}  {purpose}" for command, purpose in commands))
    print("\n`symphony --help` lists all commands.")
    return 0
