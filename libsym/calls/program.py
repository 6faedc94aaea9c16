"""main: runs a program, and exits as a command does after an error, after Ctrl-C, or when nothing reads its output."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import NoReturn

_INTERRUPTED = 130
_PIPE_CLOSED = 141
"""Exit status after a signal, by the shell's convention: 128 plus the signal's number."""


def main(program: Callable[[], object]) -> NoReturn:
    """Run a program's main function, or a coroutine function under anyio, and exit as a command does.

    An OSError, such as any SymError, ends the process with status 1 and one line: the program's name and the message.
    Ctrl-C ends the process with status 130. If the process that reads the output has ended (`| head -1`), this process
    ends quietly. Other exceptions are defects, and show a traceback.

    >>> try:
    ...     sym.main(lambda: sym.kv_open("no.kv"))
    ... except SystemExit as end:
    ...     print(str(end).partition(": ")[2])
    no.kv: no such file
    """
    try:
        outcome = program()
        if inspect.iscoroutine(outcome):
            import anyio  # noqa: PLC0415 - most programs need no event loop

            anyio.run(lambda: outcome)
        sys.stdout.flush()
    except (KeyboardInterrupt, OSError, BaseExceptionGroup) as error:
        errors = _leaves(error)
        if any(isinstance(each, KeyboardInterrupt) for each in errors):
            sys.exit(_INTERRUPTED)
        if any(isinstance(each, BrokenPipeError) for each in errors):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # without this, the flush at exit would fail
            sys.exit(_PIPE_CLOSED)
        if not all(isinstance(each, OSError) for each in errors):
            raise
        sys.exit(_line_of(errors[0]))
    sys.exit(0)


def program_name() -> str:
    """Return the name of this program: the name of its file or of its package."""
    file = PurePath(sys.argv[0])
    return (file.parent.name if file.name == "__main__.py" else file.stem) or "program"


def _line_of(error: BaseException) -> str:
    name = program_name()
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{name}: {error.filename}: {error.strerror}"
    return f"{name}: {error}"


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside an exception group, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]
