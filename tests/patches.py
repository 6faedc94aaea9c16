"""Patches of our own code that nothing calls: a test whose patch has lost its target proves nothing."""

import functools
import types
from typing import Any

import pytest

OWN = {"decoder", "kvfs", "libsym", "lips", "scheduler", "symphony", "triton_kernels"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def guard(function: Any) -> Any:
    """A function that stands where nothing is to call it: such a patch holds when it was not called."""
    function.is_guard = True
    return function


class Patches(pytest.MonkeyPatch):  # type: ignore[misc]  # final for others: its two calls are all that this needs
    """pytest's `monkeypatch`, which also knows which functions in the place of our own were called."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls: dict[str, int] = {}

    def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:
        if value and not isinstance(target, str) and _is_own(target):
            value = (self._counted(f"{_name(target)}.{name}", value[0], of_class=isinstance(target, type)), *value[1:])
        plain: Any = super().setattr
        plain(target, name, *value, raising=raising)

    def _counted(self, what: str, value: Any, *, of_class: bool) -> Any:
        function = value.__func__ if isinstance(value, staticmethod) else value
        if not isinstance(function, _FUNCTIONS) or getattr(function, "is_guard", False):
            return value
        self._num_calls.setdefault(what, 0)

        def counted(*args: Any, **named: Any) -> Any:
            self._num_calls[what] += 1
            return function(*args, **named)

        functools.update_wrapper(counted, function)
        return staticmethod(counted) if of_class and not isinstance(value, types.FunctionType) else counted

    @property
    def uncalled(self) -> list[str]:
        """Patches of our own code that nothing has called."""
        return [what for what, count in self._num_calls.items() if not count]


def _is_own(target: Any) -> bool:
    return _module(target).partition(".")[0] in OWN


def _module(target: Any) -> str:
    if isinstance(target, types.ModuleType):
        return target.__name__
    return target.__module__ if isinstance(target, type) else type(target).__module__


def _name(target: Any) -> str:
    return target.__name__ if isinstance(target, (types.ModuleType, type)) else type(target).__name__
