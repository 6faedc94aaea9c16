"""Every public name of libsym is described with an example, and every example does what it says."""

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import libsym as sym
from tests.symphony.examples import run_examples

CONSTANTS = {"PIN", "UNPIN", "COLD", "WILLNEED"}
"""Values for kv_advise(), whose examples use them: objects have no docstring of their own."""

INTERNAL = {
    "KV.exchange": "for kv_keep",
    "KV.give_up": "for whoever closes the file",
    "KV.moved": "for kv_rename",
    "KV.named": "for kv_open_or_compute",
    "KvStat.from_json": "of what the daemon said",
    "ModelInfo.from_json": "of what the daemon said",
    "ProgramInfo.from_json": "of what the daemon said",
    "Generation.take": "of a reply",
    "AsyncGeneration.take": "of a reply",
    "AsyncGeneration.fetch": "of a reply",
}
"""Methods without an underscore that libsym itself calls, in another module than their own."""

WITHOUT_EXAMPLE = {
    "daemon_check": "only root and the daemon's own user may call it, and the figures are the daemon's",
    "connect": "a socket is a place on somebody's machine; the manual page has some",
}
"""Calls that can have no example that holds everywhere, each with the reason; their coroutines alike."""


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods that libsym wrote, its bases' too; plain properties explain themselves beside the others."""
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if not name.startswith("_") and isinstance(found, FunctionType) and found.__module__.startswith("libsym"):
            yield name, found


def described(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        found = getattr(module, name)
        if name in CONSTANTS or inspect.ismodule(found):
            continue
        if inspect.isclass(found) and issubclass(found, sym.SymError):
            continue  # raised by the calls: the manual lists them with their errnos
        if name not in WITHOUT_EXAMPLE:
            yield prefix + name, found
        if inspect.isclass(found):
            methods = {f"{name}.{method}": each for method, each in own_methods(found)}
            yield from ((prefix + method, each) for method, each in methods.items() if method not in INTERNAL)


DESCRIBED = {**dict(described("sym.", sym)), **dict(described("sym.aio.", sym.aio)), "sym.aio": sym.aio}


@pytest.fixture
def mount(shared):
    sym.close()
    return shared.mount


class Awaiting(ast.NodeTransformer):
    """Has a program call `await sym.aio.x()` for `sym.x()`, where that may wait."""

    def visit_Call(self, node):
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(ast.Name("sym"), name) if inspect.iscoroutinefunction(getattr(sym.aio, name, None)):
                called = ast.Attribute(ast.Attribute(ast.Name("sym"), "aio"), name)
                return ast.Await(ast.Call(called, node.args, node.keywords))
        return node

    def visit_With(self, node):
        self.generic_visit(node)
        return ast.copy_location(ast.AsyncWith(node.items, node.body), node)


def awaited(text):
    """Return the examples of a function in the form of its coroutine."""
    found = []
    for example in doctest.DocTestParser().get_examples(text):
        lines = ast.unparse(Awaiting().visit(ast.parse(example.source))).splitlines()
        found += [f"{'...' if number else '>>>'} {line}" for number, line in enumerate(lines)]
        found += ["...", *example.want.splitlines()]
    return "\n".join(found) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", DESCRIBED)
def test_its_example_does_what_it_says(name, mount):
    text = inspect.getdoc(DESCRIBED[name]) or ""
    is_the_functions = name.startswith("sym.aio.") and text == inspect.getdoc(DESCRIBED.get(f"sym.{name[8:]}"))
    run_examples(awaited(text) if is_the_functions else text, name, mount)


def test_examples_of_a_function_hold_for_its_coroutine():
    """The test above converts a function's examples, so it does not run the same ones twice."""
    text = inspect.getdoc(sym.aio.kv_lock)
    assert text == inspect.getdoc(sym.kv_lock)
    assert "async with await sym.aio.kv_lock(kv):" in awaited(text)


def test_the_manual_of_the_module_runs(mount):
    run_examples(sym.__doc__, "libsym", mount)


def test_help_names_everything_that_there_is():
    assert set(sym.__all__) - set(re.findall(r"\w+", sym.__doc__)) == set()
