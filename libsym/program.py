"""Ends of a program: messages of errors, of Ctrl-C, and of a reader who has gone."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import NoReturn

_INTERRUPTED = 130
_PIPE_CLOSED = 141
"""Status of a program that a signal ended, as a shell has it: 128 and the signal's number."""


def main(program: Callable[[], object]) -> NoReturn:
    """Runs a program's main function, or a coroutine function under anyio, and ends the process as a command ends.

    An OSError, which every SymError is, is told in one line behind the program's name, and the status is 1. Ctrl-C ends
    it with 130. Where nobody reads its output any more (`| head -1`), it ends quietly. Other exceptions are defects:
    they show where they come from.

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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
            sys.exit(_PIPE_CLOSED)
        if not all(isinstance(each, OSError) for each in errors):
            raise
        sys.exit(_line_of(errors[0]))
    sys.exit(0)


def program_name() -> str:
    """The name of this program, by its file; a package has its own."""
    file = PurePath(sys.argv[0])
    return (file.parent.name if file.name == "__main__.py" else file.stem) or "program"


def _line_of(error: BaseException) -> str:
    name = program_name()
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{name}: {error.filename}: {error.strerror}"
    return f"{name}: {error}"


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors of tasks come in groups; where all are of one kind, they are told as one would be."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]
