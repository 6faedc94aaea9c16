#!/usr/bin/env python3
"""Doors: functions that one object assigns to another object's attribute, where no constructor or contract shows them.

An object should get its callbacks when it is made. The packages may contain no `other.attribute = function`, except
those in KNOWN, and KNOWN may contain no stale entries. A function is a lambda, a `partial`, a function's name, a
method, or a callable object. Any value of an attribute that is declared as a function counts, too.

The check misses methods and attributes whose name means a value elsewhere, and functions inside containers.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvfs", "libsym", "scheduler", "symphony", "decoder", "triton_kernels", "lips")
KNOWN = {
    "kvfs/durable/index.py: self._database.text_factory",
    "kvfs/durable/salvage.py: database.text_factory",
    "lips/gateway/connections.py: H11Protocol._check_protocol",
}
"""Attributes of libraries that offer no other way: sqlite3's and Hypercorn's."""
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef
VALUES = {"property", "cached_property", "setter"}
"""Decorators of methods whose names stand for a value."""


class Names:
    """Names in the packages that stand for functions."""

    def __init__(self, statements: Sequence[ast.AST]) -> None:
        self.types, self.methods, self.hooks, values = {"Callable"}, set[str](), set[str](), set[str]()
        functions = _functions(statements)
        for node in statements:
            match node:
                case ast.ClassDef(name=name, body=body):
                    for each in body:
                        if isinstance(each, DEFINITIONS):
                            is_value = VALUES & {*map(_last, each.decorator_list)}
                            (values if is_value else self.methods).add(each.name)
                            self.types |= {name} if each.name == "__call__" else set()
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._is_type(value):
                    self.types.add(name)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if self._is_type(value):
                    self.types.add(name)
        for node in statements:
            match node:
                case ast.AnnAssign(target=annotated, annotation=annotation):
                    (self.hooks if self._is_type(annotation) else values).add(_last(annotated))
                    continue
            for target, value in _pairs(node):
                is_method = isinstance(value, ast.Attribute) and value.attr in self.methods
                is_function = is_method or isinstance(value, ast.Lambda) or _last(value) in functions
                if isinstance(target, ast.Attribute) and _is_own(target) and not is_function:
                    values.add(target.attr)
        self.methods -= values
        self.hooks -= values

    def _is_type(self, node: ast.expr) -> bool:
        match node:
            case ast.Subscript(value=value):
                return self._is_type(value)
            case ast.BinOp(left=left, right=right):
                return self._is_type(left) or self._is_type(right)
        return _last(node) in self.types

    def is_function(self, value: ast.expr, functions: set[str]) -> bool:
        match value:
            case ast.Lambda():
                return True
            case ast.Call(func=func):
                return _last(func) in {"partial", *self.types}
            case ast.Name(id=name):
                return name in functions
            case ast.IfExp(body=first, orelse=other) | ast.BoolOp(values=[first, *_, other]):
                return self.is_function(first, functions) or self.is_function(other, functions)
            case ast.Attribute(attr=name):
                return name in self.methods
        return False


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of a module, nested ones included."""
    for each in body:
        yield each
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _statements(getattr(each, name, ()))


def _functions(statements: Sequence[ast.AST]) -> set[str]:
    """Return the names of functions that are not methods."""
    members = {each for one in statements if isinstance(one, ast.ClassDef) for each in one.body}
    return {each.name for each in statements if isinstance(each, DEFINITIONS) and each not in members}


def _imported(statements: Sequence[ast.AST], functions: set[str]) -> set[str]:
    """Return the names under which a module imports functions of other modules."""
    imports = [each for each in statements if isinstance(each, ast.ImportFrom)]
    return {alias.asname or alias.name for each in imports for alias in each.names if alias.name in functions}


def _pairs(statement: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment, with their values."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case ast.AnnAssign(target=annotated, value=ast.expr() as value):
            pairs = [(annotated, value)]
        case _:
            pairs = []
    for target, value in pairs:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs += zip(target.elts, values, strict=False)
    return pairs


def _is_own(target: ast.Attribute) -> bool:
    return _last(target.value) in {"self", "cls"}


def found(root: Path) -> dict[str, int]:
    """Return the functions assigned to other objects' attributes, with their lines."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    modules = {path: [*_statements(ast.parse(path.read_bytes()).body)] for path in paths}
    names, hooks = Names([each for module in modules.values() for each in module]), dict[str, int]()
    every = {name for module in modules.values() for name in _functions(module)}
    for path, module in modules.items():
        functions = _functions(module) | _imported(module, every)
        for target, value in (pair for each in module for pair in _pairs(each)):
            if not isinstance(target, ast.Attribute) or _is_own(target) or isinstance(value, ast.Constant):
                continue
            if target.attr in names.hooks or names.is_function(value, functions):
                hooks[f"{path.relative_to(root)}: {ast.unparse(target)}"] = target.lineno
    return hooks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT)
    hooks = found(parser.parse_args().root)
    for hook in sorted(hooks.keys() - KNOWN):
        print(f"{hook} (line {hooks[hook]}) gets a function: give it to the constructor")
    for hook in sorted(KNOWN - hooks.keys()):
        print(f"{hook} gets no function any more: take it out of KNOWN")
    return 1 if hooks.keys() ^ KNOWN else 0


if __name__ == "__main__":
    raise SystemExit(main())
