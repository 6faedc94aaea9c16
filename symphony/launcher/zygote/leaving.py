"""Ending of a Python program's process: like the interpreter's finalization, but without the zygote's modules.

When an interpreter ends, it clears all of its modules and strings. In a fork, clearing would copy almost every page
that is shared with the zygote. Clearing would take three quarters of a short program's processor time. So only the
program's own modules are cleared here. The end has these steps: threads are joined, functions of atexit run, standard
output is flushed, the program's modules are cleared, reference cycles are collected, and the C library's exit(3) does
the rest. `__del__`, weak references and files without close() work as usual. Objects that the program put into one of
the zygote's modules stay, and their `__del__` is not called.

If a program has daemon threads, or calls sys.exit(), the interpreter ends it.

The status is decided before modules are cleared. Later errors are printed as the interpreter prints ignored errors.
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
"""Exit status if the last flush fails. The interpreter uses the same status."""
_HOLD_EXCEPTIONS = "last_type", "last_value", "last_traceback"


def leave(status: int, inherited: Collection[str]) -> None:
    """End this process.
    The call returns if only the interpreter can end the process. `inherited`: names of the zygote's modules.
    """
    _join_threads()
    if _has_threads():
        return
    atexit._run_exitfuncs()  # noqa: SLF001 - it has no public name; the interpreter will not call the functions again
    if _has_threads():
        return
    is_flushed = _flush()
    try:
        _take_apart(inherited)
    except BaseException as error:  # noqa: BLE001 - any object may raise anything, and the process ends anyway
        _ignored(_take_apart, error)
    if not (_flush() and is_flushed):
        status = _FLUSH_FAILED
    ctypes.PyDLL(None).exit(status)  # PyDLL keeps the interpreter's lock, so no other thread runs Python


def _has_threads() -> bool:
    """Return whether daemon threads run, which would still use the modules."""
    return len(sys._current_frames()) > 1  # noqa: SLF001 - includes threads that C started


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - the interpreter calls it, too
    except BaseException as error:  # noqa: BLE001 - probably an interrupt, which ends only the wait
        _ignored(threading, error)


def _flush() -> bool:
    """Flush the standard streams. False: standard output could not be flushed."""
    with suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - the program may have replaced the stream
        _ignored(sys.stdout, error)
        return False
    return True


def _ignored(where: object, error: BaseException) -> None:
    with suppress(Exception):
        sys.stderr.write(f"Exception ignored in: {where!r}\n")
        traceback.print_exception(error, file=sys.stderr)


def _take_apart(inherited: Collection[str]) -> None:
    """Clear the program's modules, in the same order as the interpreter.

    Modules that only sys.modules refers to are freed immediately. The contents of the other modules are cleared,
    beginning with the latest module.
    """
    gc.collect()  # orders cycles so that a text stream is freed before the file below it
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
    """Return the names of the program's own modules.
    Only real modules count: other objects in sys.modules (such as cffi's libraries) may allow no weak references.
    """
    return [name for name, each in sys.modules.items() if issubclass(type(each), ModuleType) and name not in inherited]


def _empty(module: ModuleType) -> None:
    contents = object.__getattribute__(module, "__dict__")  # vars() would load a lazy module
    names = [name for name in contents if name != "__builtins__"]
    for name in sorted(names, key=_is_private, reverse=True):
        contents[name] = None


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")
