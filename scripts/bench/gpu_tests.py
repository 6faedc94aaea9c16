#!/usr/bin/env python3
"""Run the kernels' own tests on a GPU without pytest: `python scripts/bench/gpu_tests.py TEST_FILE [--most N]`.

Test files import a stand-in for `pytest` that has the names used in tests/triton_kernels. The output is a line of JSON
for each test.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_imports import ROOT, use_source_tree

TESTS = ROOT / "tests" / "triton_kernels"


class Marks:
    """Stand-in for `pytest.mark`. Marks other than parametrize and usefixtures have no effect."""

    def parametrize(self, names: str | tuple[str, ...], values: Any, **_: Any) -> Callable:
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        many = len(listed) > 1
        cases = [
            dict(zip(listed, value if many else (value,), strict=True))
            for value in (getattr(value, "values_of_param", value) for value in values)
        ]
        return self._noting("cases", cases)

    def usefixtures(self, *names: str) -> Callable:
        return self._noting("fixtures", names)

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **_: args[0] if args and inspect.isfunction(args[0]) else self._noting("other", ())

    @staticmethod
    def _noting(kind: str, what: Any) -> Callable:
        def decorate(function: Callable) -> Callable:
            function.__dict__.setdefault(kind, []).append(what)
            return function

        decorate.kind, decorate.what = kind, what
        return decorate


class Skipped(Exception):  # noqa: N818
    pass


def stand_in() -> types.ModuleType:
    pytest = types.ModuleType("pytest")

    def fixture(function: Callable | None = None, **options: Any) -> Callable:
        if function is None:
            return lambda later: fixture(later, **options)
        function.is_fixture, function.params = True, options.get("params", [None])
        return function

    @contextmanager
    def raises(kind: type[BaseException], match: str | None = None) -> Iterator[types.SimpleNamespace]:
        seen = types.SimpleNamespace(value=None)
        try:
            yield seen
        except kind as error:
            seen.value = error
            if match is not None and not re.search(match, str(error)):
                raise AssertionError(f"{error!r} does not say {match!r}") from error
        else:
            raise AssertionError(f"{kind.__name__} was not raised")

    def skip(reason: str = "") -> None:
        raise Skipped(reason)

    def param(*values: Any, **_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(values_of_param=values if len(values) > 1 else values[0])

    pytest.mark, pytest.fixture, pytest.raises = Marks(), fixture, raises
    pytest.skip, pytest.param, pytest.MonkeyPatch = skip, param, MonkeyPatch
    return pytest


class MonkeyPatch:
    """Stand-in for pytest's `MonkeyPatch` with the methods that the tests use."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: Any, *value: Any) -> None:
        if not value:
            path, value = target, (name,)
            module, name = path.rsplit(".", 1)
            target = importlib.import_module(module)
        self._before.append((target, name, getattr(target, name)))
        setattr(target, name, value[0])

    def setenv(self, name: str, value: str) -> None:
        os.environ[name] = value

    def undo(self) -> None:
        while self._before:
            setattr(*self._before.pop())


class Runner:
    """The tests of one file."""

    def __init__(self, file: Path) -> None:
        sys.modules["pytest"] = stand_in()
        use_source_tree()
        self.fixtures: dict[str, Callable] = {}
        self.module = None
        for path in (TESTS / "conftest.py", file):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            self.module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = self.module
            spec.loader.exec_module(self.module)
            self.fixtures |= {n: f for n, f in vars(self.module).items() if getattr(f, "is_fixture", False)}

    def tests(self) -> Iterator[tuple[str, Callable, dict[str, Any]]]:
        for name, function in vars(self.module).items():
            if name.startswith("test_") and inspect.isfunction(function):
                for chosen in itertools.product(*getattr(function, "cases", [])):
                    arguments = {key: value for case in chosen for key, value in case.items()}
                    label = "-".join(str(value) for value in arguments.values())
                    yield f"{name}[{label}]" if label else name, function, arguments

    def run(self, function: Callable, arguments: dict[str, Any]) -> None:
        marks = getattr(self.module, "pytestmark", [])
        used = [name for mark in (marks if isinstance(marks, list) else [marks]) for name in self._names(mark)]
        used += [name for names in getattr(function, "fixtures", []) for name in names]
        patch = MonkeyPatch()
        made: dict[str, Any] = {"monkeypatch": patch}
        endings: list[Any] = []
        try:
            for name in used:
                self._make(name, made, endings)
            wanted = [name for name in inspect.signature(function).parameters if name not in arguments]
            function(**arguments, **{name: self._make(name, made, endings) for name in wanted})
        finally:
            for ending in reversed(endings):
                next(ending, None)
            patch.undo()

    @staticmethod
    def _names(mark: Any) -> tuple[str, ...]:
        return mark.what if getattr(mark, "kind", "") == "fixtures" else ()

    def _make(self, name: str, made: dict[str, Any], endings: list[Any]) -> Any:
        if name not in made:
            function = self.fixtures[name]
            value = function(**{key: self._make(key, made, endings) for key in inspect.signature(function).parameters})
            if inspect.isgenerator(value):
                endings.append(value)
                value = next(value)
            made[name] = value
        return made[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one file of the kernels' tests without pytest.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--most", type=int, default=0, help="run only so many tests, evenly chosen; 0: all")
    options = parser.parse_args()
    runner = Runner(options.file.resolve())
    tests = list(runner.tests())
    if options.most:
        tests = tests[:: max(1, -(-len(tests) // options.most))]
    for name, function, arguments in tests:
        started = time.monotonic()
        outcome, why = "passed", ""
        try:
            runner.run(function, arguments)
        except Skipped as error:
            outcome, why = "skipped", str(error)
        except Exception as error:  # noqa: BLE001  # any exception is a failure of the test
            outcome, why = "failed", "".join(traceback.format_exception(error)[-3:])[-1500:]
        seconds = round(time.monotonic() - started, 3)
        print(json.dumps({"test": name, "outcome": outcome, "seconds": seconds, "why": why}), flush=True)


if __name__ == "__main__":
    main()
