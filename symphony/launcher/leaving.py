"""How a program that has run to its end leaves: as an interpreter ends, but for what it was forked with.

An interpreter takes all of its modules and strings apart. For a fork that means a copy of nearly each page of the
zygote's, just to go: three quarters of the processor time of a short program. So only what the program itself made is
taken apart here. In order: threads are joined, atexit's functions run, standard output is flushed, modules of the
program lose their contents, cycles are collected, and the C library's exit(3) does the rest. Whatever `__del__`, weak
references and files without close() do at the end, they do. What the program put into a module of the zygote's stays as
it is, without its `__del__`.

A program with daemon threads, and one that calls sys.exit(), end by the interpreter itself.

The status is settled before anything is taken apart: what fails then is told as the interpreter tells what it ignores.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Collection
from contextlib import suppress
from types import ModuleType

_FLUSH_FAILED = 120
"""As the interpreter has it."""
_HOLD_EXCEPTIONS = "last_type", "last_value", "last_traceback"


def leave(status: int, inherited: Collection[str]) -> None:
    """Ends this process; returns where only the interpreter can. `inherited`: the modules that it was forked with."""
    _join_threads()
    if _has_threads():
        return
    atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter has no other name for it; none are left to it
    if _has_threads():
        return
    is_flushed = _flush()
    try:
        _take_apart(inherited)
    except BaseException as error:  # noqa: BLE001 - modules may be anything, and an interrupt may come: it is over
        _ignored(_take_apart, error)
    if not (_flush() and is_flushed):
        status = _FLUSH_FAILED
    ctypes.PyDLL(None).exit(status)  # no thread gets the interpreter any more


def _has_threads() -> bool:
    """Daemon threads: they would see modules fall apart."""
    return len(sys._current_frames()) > 1  # noqa: SLF001 - threads of C, too


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter does
    except BaseException as error:  # noqa: BLE001 - an interrupt, most likely: it ends the wait and nothing else
        _ignored(threading, error)


def _flush() -> bool:
    """Whether standard output could be; of standard error nobody asks."""
    with suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - the object is the program's
        _ignored(sys.stdout, error)
        return False
    return True


def _ignored(where: object, error: BaseException) -> None:
    with suppress(Exception):
        sys.stderr.write(f"Exception ignored in: {where!r}\n")
        traceback.print_exception(error, file=sys.stderr)


def _take_apart(inherited: Collection[str]) -> None:
    """The program's modules, in the interpreter's own order: those that only sys.modules holds go at once, the others
    lose their contents, the latest first.
    """
    gc.collect()  # brings cycles into an order in which text comes before the file below it
    for name in _HOLD_EXCEPTIONS:
        setattr(sys, name, None)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, getattr(sys, f"__{name}__"))
    left = [weakref.ref(sys.modules.pop(name)) for name in _own(inherited)]
    gc.collect()
    for each in reversed(left):
        module = each()
        if module is not None:
            _empty(module)
    gc.collect()


def _own(inherited: Collection[str]) -> list[str]:
    """By type: an object of another kind may claim to be a module (cffi's libraries do), and refuse weak references."""
    return [name for name, each in sys.modules.items() if issubclass(type(each), ModuleType) and name not in inherited]


def _empty(module: ModuleType) -> None:
    contents = object.__getattribute__(module, "__dict__")  # a module that is loaded lazily would be loaded by vars()
    names = [name for name in contents if name != "__builtins__"]
    for name in sorted(names, key=_is_private, reverse=True):
        contents[name] = None


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")
