"""A system call of one script: a function that waits with the thread, and `libsym.aio`'s that waits with the task.

    @system_call
    def kv_chmod(path: Path, mode: int) -> Script[None]:
        yield Call(Op.KV_CHMOD, args=(permissions(mode), 0, 0, 0), payload=path_bytes(path))

The script has the name, the arguments and the words that programs see: `kv_chmod("a.kv", 0o644)` gives what the script
returns, and `kv_chmod = coroutine(names.kv_chmod)` in `libsym.aio` is the same to be awaited. Another script goes
through it by `yield from script_of(kv_chmod)(path, mode)`.

The connection is that of the file, where the first argument is an open one, else this process's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from libsym.channel.process import process
from libsym.channel.scripts import Script
from libsym.open_file import OpenFile, not_open

P = ParamSpec("P")
T = TypeVar("T")


def system_call(script: Callable[P, Script[T]]) -> Callable[P, T]:
    """The function that makes the calls of a script and waits with the thread."""
    return _function(script, needs_file=False)


def file_call(script: Callable[P, Script[T]]) -> Callable[P, T]:
    """As `system_call`, of a script whose first argument has to be an open file: else it is Invalid."""
    return _function(script, needs_file=True)


def _function(script: Callable[P, Script[T]], *, needs_file: bool) -> Callable[P, T]:
    @wraps(script)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        steps = script(*args, **kwargs)  # arguments that are too many or too few end it here
        file = args[0] if args else kwargs.get("kv")
        if isinstance(file, OpenFile):
            return file.channel.run(steps)
        check_file(call, file)
        return process.channel().run(steps)

    # What help() and the like read, here and through __wrapped__: the result, not the script that returns it.
    given = str(script.__annotations__["return"]).removeprefix("Script[").removesuffix("]")
    call.__annotations__["return"] = script.__annotations__["return"] = given
    vars(call)["needs_file"] = needs_file
    return call


def script_of(call: Callable[P, T]) -> Callable[P, Script[T]]:
    """Return the script that `system_call` or `file_call` made a function of."""
    script: Callable[P, Script[T]] = vars(call)["__wrapped__"]
    return script


def first_argument(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """The subject of a call. An open file may be named, too."""
    return args[0] if args else kwargs.get("kv")


def check_file(call: Callable[..., object], given: object) -> None:
    """Raise Invalid if a `file_call` was given something else than an open file."""
    if vars(call)["needs_file"]:
        raise not_open(given, call.__name__)
