"""`symphony run PROG [ARGS]`: a program beside the model, in this user's own name, its output streamed here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import libsym
from libsym.errors import NotFound

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run_program(program: str, arguments: list[str], socket: Path | None) -> int:
    """Run a Python program until it ends; its exit status (128 + the signal's number if one ended it)."""
    path = Path(program)
    if not path.is_file():
        raise NotFound(f"no program {program}: give the path of a Python file")
    libsym.connect(str(socket) if socket else None)  # says now, in one line, if no daemon is there
    libsym.close()
    environment = dict(os.environ)
    if socket:
        environment["SYMPHONY_SOCKET"] = str(socket)
    child = subprocess.Popen([sys.executable, "-u", str(path), *arguments], env=environment)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    # Ctrl-C reaches the whole foreground group by itself: the program decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = child.wait()
    return status if status >= 0 else 128 - status
