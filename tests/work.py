"""Counts work instead of time: how many places of arrays, and of lists of free pages, a call looks at.

`Work.watch` puts arrays that count in the place of all arrays that objects have. An operation of numpy on such an
array, or on a part of it, counts the places that it reads or writes; a slice alone counts nothing. So do new arrays.
Functions in C count the pages that they are told, and the words and blocks of free pages that they look at.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvfs.pages import counts, free_list
from kvfs.pages.free_list import FreeList

_METHODS = (
    "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "byteswap", "choose", "clip", "compress",
    "copy", "cumprod", "cumsum", "diagonal", "dot", "dump", "dumps", "fill", "flatten", "item", "max", "mean", "min",
    "nonzero", "partition", "prod", "put", "ravel", "repeat", "round", "searchsorted", "sort", "std", "sum", "take",
    "tobytes", "tofile", "tolist", "trace", "var", "__contains__",
)  # fmt: skip
_NEW = ("arange", "array", "asarray", "ascontiguousarray", "bincount", "full", "ones", "unpackbits")
"""Functions that fill an array; memory of zeros that nobody has touched costs nothing."""
_LAZY = ("empty", "zeros")
_PACKAGES = ("kvfs.", "scheduler.")


class Work:
    """Work on this thread: the objects that have been looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num = 0
        self._thread = threading.get_ident()
        self._lists: list[FreeList] = []
        _Counted.work = self
        for name in _NEW:
            monkeypatch.setattr(np, name, self._counting(getattr(np, name)))
        for name in _LAZY:
            monkeypatch.setattr(np, name, _lazy(getattr(np, name)))
        for module in (counts, free_list):
            monkeypatch.setattr(module, "pointer", self._pointer(free_list.pointer))

    def add(self, num: int) -> None:
        if threading.get_ident() == self._thread:
            self._num += num

    @property
    def num(self) -> int:
        return self._num + sum(int(each.core.num_looked) for each in self._lists)

    def watch(self, *objects: object) -> int:
        """Count what is done with arrays of objects, and of all that they lead to: how many arrays there are."""
        seen: set[int] = set()
        waiting, num = list(objects), 0
        while waiting:
            each = waiting.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, FreeList):
                self._lists.append(each)
            for name, value in list(_attributes(each)):
                if type(value) is np.ndarray:
                    object.__setattr__(each, name, value.view(_Counted))
                    num += 1
                else:
                    waiting += _parts(value)
        return num

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            self.add(np.size(found))
            return found

        return counted

    def _pointer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(pages: Any) -> Any:
            self.add(pages.size)
            return function(pages)

        return counted


class _Counted(np.ndarray[Any, Any]):
    """An array whose places are counted when they are looked at."""

    work: Work

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        arrays = [*inputs, *(out or ())]
        if method == "at":
            arrays = arrays[1:]
        self.work.add(max((np.size(each) for each in arrays), default=0))
        if out is not None:
            options["out"] = tuple(_plain(each) for each in out)
        found = getattr(ufunc, method)(*map(_plain, inputs), **options)
        return found if out is None else out[0] if len(out) == 1 else out

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        del types
        self.work.add(sum(each.size for each in _leaves((args, options)) if isinstance(each, np.ndarray)))
        found = function(*map(_deeply_plain, args), **{name: _deeply_plain(each) for name, each in options.items()})
        self.work.add(sum(np.size(each) for each in _leaves(found)))
        return found

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, np.ndarray) and found.base is self:
            return found
        self.work.add(_size_of_key(key) + np.size(found))
        return _plain(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self.view(np.ndarray)
        is_view = not any(isinstance(each, np.ndarray | list) for each in (key if isinstance(key, tuple) else (key,)))
        self.work.add(np.size(place[key]) if is_view else _size_of_key(key) + np.size(value))
        place[key] = _plain(value)

    def __iter__(self) -> Any:
        self.work.add(self.size)
        return iter(self.view(np.ndarray))

    def __bytes__(self) -> bytes:
        return self.tobytes()


def _method(name: str) -> Callable[..., Any]:
    def counted(self: _Counted, *args: Any, **options: Any) -> Any:
        self.work.add(self.size)
        return getattr(self.view(np.ndarray), name)(*map(_plain, args), **options)

    return counted


for each in _METHODS:
    setattr(_Counted, each, _method(each))


def _lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    def lazy(*args: Any, **options: Any) -> Any:
        return function(*args, **options).view(_Counted)

    return lazy


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Counted) else value


def _deeply_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_deeply_plain, value))
    return _plain(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _size_of_key(key: Any) -> int:
    return sum(each.size for each in _leaves(key) if isinstance(each, np.ndarray))


def _attributes(value: object) -> Iterable[tuple[str, Any]]:
    if not type(value).__module__.startswith(_PACKAGES):
        return
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            full = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__weakref__", "__dict__") and hasattr(value, full):
                yield full, getattr(value, full)


def _parts(value: Any) -> list[Any]:
    """Objects that an attribute leads to: one of ours, or those in a container, or whose method it is."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return [part for each in value for part in _parts(each)]
    owner = getattr(value, "__self__", value)
    return [owner] if type(owner).__module__.startswith(_PACKAGES) else []


@contextmanager
def counted(work: Work, counts_of: dict[str, int], what: str) -> Iterator[None]:
    before = work.num
    yield
    counts_of[what] = work.num - before
