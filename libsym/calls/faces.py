"""Decorators that turn a script into a system call: a function for threads. `libsym.aio` makes the coroutine functions.

    @system_call
    def kv_chmod(path: Path, mode: int) -> Script[None]:
        yield Call(Op.KV_CHMOD, args=(permissions(mode), 0, 0, 0), payload=path_bytes(path))

Programs see the name, the arguments and the docstring of the script. `kv_chmod("a.kv", 0o644)` returns the result of
the script. `kv_chmod = coroutine(names.kv_chmod)` in `libsym.aio` makes the coroutine function. Another script runs
this script by `yield from script_of(kv_chmod)(path, mode)`.

If the first argument is an open file, the call uses the file's connection. Otherwise it uses this process's connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from libsym.calls.open_file import OpenFile, not_open
from libsym.channel.process import process
from libsym.channel.scripts import Script

P = ParamSpec("P")
T = TypeVar("T")


def system_call(script: Callable[P, Script[T]]) -> Callable[P, T]:
    """Return a function that runs a script while the calling thread waits."""
    return _function(script, needs_file=False)


def file_call(script: Callable[P, Script[T]]) -> Callable[P, T]:
    """Return a function that runs a script whose first argument has to be an open file (else Invalid)."""
    return _function(script, needs_file=True)


def _function(script: Callable[P, Script[T]], *, needs_file: bool) -> Callable[P, T]:
    @wraps(script)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        steps = script(*args, **kwargs)  # raises TypeError for a wrong number of arguments
        file = args[0] if args else kwargs.get("kv")
        if isinstance(file, OpenFile):
            return file.channel.run(steps)
        check_file(call, file)
        return process.channel().run(steps)

    # help() reads these annotations and those of __wrapped__. help() should show the type of the result, not of the
    # script.
    given = str(script.__annotations__["return"]).removeprefix("Script[").removesuffix("]")
    call.__annotations__["return"] = script.__annotations__["return"] = given
    vars(call)["needs_file"] = needs_file
    return call


def script_of(call: Callable[P, T]) -> Callable[P, Script[T]]:
    """Return the script of a function that `system_call` or `file_call` made."""
    script: Callable[P, Script[T]] = vars(call)["__wrapped__"]
    return script


def first_argument(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Return the first argument of a call, given by position or as `kv`."""
    return args[0] if args else kwargs.get("kv")


def check_file(call: Callable[..., object], given: object) -> None:
    """Raise Invalid if a `file_call` got a first argument that is not an open file."""
    if vars(call)["needs_file"]:
        raise not_open(given, call.__name__)
