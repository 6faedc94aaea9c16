#!/usr/bin/env python3
"""Unused names: functions, methods, classes and constants of the packages, and functions in C.

Uses count in the packages, in scripts and in setup.py. Uses in tests do not count: a name that only tests need should
be removed, with its tests. A definition, an import, an entry of `__all__`, and a name within itself are no uses. A
module's function is identified by module and name, a method by its name alone: a use of another method of that name
counts for both. A string counts as a use if it is a name (`getattr`, tables). All words of shell scripts count.

Some names need no use: those in libsym's `__all__` with their public methods, special methods, methods of classes that
inherit from a library's class, functions that a decorator registers, and those in KNOWN.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvfs", "libsym", "scheduler", "symphony", "decoder", "triton_kernels", "lips")
USERS = ("scripts", "setup.py", "pyproject.toml", "Dockerfile")
KNOWN = {
    "CpuDecoder.shared_rows": "by this value a test sees that files read common pages once: the results do not show it",
    "Policy.num_compared": "by this value a test sees that plans compare no more calls than sorting does",
    "_ERROR": "lips/gateway: a constant of the kernel, beside constants that are used",
    "lines_of": "symphony/settings: only a test calls it",
    "process_logits": "GPUs need it as soon as the cuda backend draws tokens",
}
"""Unused names, and the reason to keep each."""
GENERATED = {"libsym/_abi.py"}
"""Generated files. They contain the whole ABI, including unused names."""
REGISTERING = {"def_extern"}
"""Decorators that pass a function to a library."""
FORMS = {"ABC", "Enum", "Exception", "Generic", "IntEnum", "IntFlag", "NamedTuple", "Protocol", "TypedDict", "object"}
"""Base classes that do not call the methods of their subclasses."""
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
C_FUNCTION = re.compile(r"^[A-Za-z_][\w \t*]*?\b(\w+)\([^;{}]*?\)\s*[;{]", re.MULTILINE)
C_STRING = re.compile(r'"(\w+)"')
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Definition:
    """A name that the packages define, and its place."""

    name: str
    path: str
    line: int
    key: str
    """Key under which the uses of the name are counted."""
    within: str = ""
    """Class that contains the definition. Empty: no class does."""
    own: int = 0
    """Number of uses within the definition itself."""
    is_c: bool = False

    @property
    def is_special(self) -> bool:
        """Whether Python or a notebook calls the method by its name."""
        return self.name.startswith("_") and self.name.endswith("_")

    @property
    def whole_name(self) -> str:
        return f"{self.within}.{self.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class _File:
    """Python file."""

    path: str
    module: str
    lines: list[str]
    imports: dict[str, str]

    def repeats_its_name(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
        """Whether the lines of a definition have its name twice. If not, nothing in it uses the name."""
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno]).count(node.name) > 1

    def uses(self, node: ast.AST, local: frozenset[str] = frozenset(), within: ast.AST | None = None) -> Iterator[str]:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name(id="__all__")]):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                local |= _locals(node)
            case ast.Name(id=name, ctx=ast.Load()) if name not in local or name in self.imports:
                yield self.imports.get(name, f"{self.module}.{name}")
                if isinstance(within, ast.ClassDef):
                    yield f".{name}"
            case ast.Attribute(attr=name, value=value, ctx=ast.Load()):
                yield f".{name}"
                first, dot, rest = ast.unparse(value).partition(".")
                if first in self.imports:
                    yield f"{self.imports[first]}{dot}{rest}.{name}"
                elif first not in {"self", "cls"}:
                    yield f"?.{name}"
            case ast.MatchClass(kwd_attrs=names):
                yield from (f".{name}" for name in names)
            case ast.Constant(value=str() as text) if re.fullmatch(r"[\w.:]+", text):
                yield from WORD.findall(text)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            within = node
        for each in ast.iter_child_nodes(node):
            if not isinstance(each, ast.expr_context):
                yield from self.uses(each, local, within)


@dataclass(slots=True)
class Found:
    """Definitions, uses and classes of all files."""

    definitions: list[Definition] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    """Number of uses by key. In Python a key is a name with its module, or an attribute (`.name`). In files of other
    languages a key is a word.
    """
    aliases: dict[str, str] = field(default_factory=dict)
    """Full names of imported names."""
    bases: dict[str, set[str]] = field(default_factory=dict)
    """Base classes of each class, by name."""
    public: set[str] = field(default_factory=set)
    """Names in libsym's `__all__`."""

    def add_python(self, path: str, text: str, *, is_product: bool) -> None:
        tree = ast.parse(text)
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        file = _File(path, module, text.splitlines(), dict(_imports(tree)))
        self.uses.update(file.uses(tree))
        if is_product:
            self.aliases |= {f"{module}.{name}": full for name, full in file.imports.items()}
        for node in tree.body if is_product and path not in GENERATED else ():
            self._add_definition(file, node)
            for name in _constants(node):
                self.definitions.append(Definition(name, path, node.lineno, f"{module}.{name}"))
                if name == "__all__" and path.startswith("libsym/"):
                    self.public |= {
                        f"{module}.{each.value!s}" for each in ast.walk(node) if isinstance(each, ast.Constant)
                    }

    def _add_definition(self, file: _File, node: ast.stmt, within: str = "") -> None:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [line for handler in getattr(node, "handlers", ()) for line in handler.body]
            for each in (*node.body, *handlers, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())):
                self._add_definition(file, each, within)
        if not isinstance(node, DEFINITIONS):
            return
        if not REGISTERING & {_last(each.func) for each in node.decorator_list if isinstance(each, ast.Call)}:
            key = f".{node.name}" if within else f"{file.module}.{node.name}"
            own = sum(each == key for each in file.uses(node)) if file.repeats_its_name(node) else 0
            self.definitions.append(Definition(node.name, file.path, node.lineno, key, within, own))
        if isinstance(node, ast.ClassDef):
            self.bases.setdefault(node.name, set()).update(map(_last, node.bases))
            for each in node.body:
                self._add_definition(file, each, node.name)

    def add_c(self, path: str, text: str, *, is_product: bool) -> None:
        text = C_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        self.uses.update(f"C {name}" for name in WORD.findall(text))
        self.uses.update(C_STRING.findall(text))
        for match in C_FUNCTION.finditer(text):
            self.uses[f"C {match[1]}"] -= 1
            if is_product and match[0].endswith("{"):
                line = text.count("\n", 0, match.start()) + 1
                self.definitions.append(Definition(match[1], path, line, f".{match[1]}", is_c=True))

    def unused(self) -> Iterator[Definition]:
        uses = Counter[str]()
        for name, count in self.uses.items():
            uses[self._defined(name)] += count
        public = {self._defined(name).rpartition(".")[2] for name in self.public}
        public |= {base for name in public for base in self._ancestors(name)}
        for each in self.definitions:
            other = f"C {each.name}" if each.is_c else each.name if each.within else f"?.{each.name}"
            is_used = uses[each.key] > each.own or uses[each.name] or uses[other]
            is_public = each.path.startswith("libsym/") and (each.within or each.name) in public
            is_called = any(base not in self.bases for base in self._ancestors(each.within) - FORMS)
            if not (is_used or is_called or each.is_special or (is_public and not each.name.startswith("_"))):
                yield each

    def _defined(self, name: str) -> str:
        """Return the name with the module that defines it."""
        passed = set[str]()
        while name in self.aliases and name not in passed:
            passed.add(name)
            name = self.aliases[name]
        return name

    def _ancestors(self, name: str) -> set[str]:
        found, left = set[str](), [name]
        while left:
            new = self.bases.get(left.pop(), set()) - found
            found |= new
            left += new
        return found


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    match node:
        case ast.Subscript(value=value):
            return _last(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _set_names(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)]


def _constants(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Assign(targets=targets):
            yield from (each.id for target in targets for each in _set_names(target))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a module imports, with their full names."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    yield (each.asname, each.name) if each.asname else (each.name.partition(".")[0],) * 2
            case ast.ImportFrom(module=str() as module, names=names):
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in names)


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    nodes = [*ast.walk(function)]
    names = {each.arg for each in nodes if isinstance(each, ast.arg)}
    names |= {each.id for each in _set_names(function)}
    return names.difference(*(each.names for each in nodes if isinstance(each, ast.Global)))


def found(root: Path) -> Found:
    result = Found()
    for top in (*PACKAGES, *USERS):
        paths = [root / top] if (root / top).is_file() else sorted((root / top).rglob("*"))
        for path in paths:
            name, is_product = str(path.relative_to(root)), top in PACKAGES
            if not path.is_file() or path == Path(__file__) or "/results/" in name or "__pycache__" in name:
                continue
            if path.suffix == ".py":
                result.add_python(name, path.read_text(encoding="utf-8"), is_product=is_product)
            elif path.suffix in {".c", ".h"}:
                result.add_c(name, path.read_text(encoding="utf-8"), is_product=is_product)
            elif path.suffix in {"", ".sh", ".toml", ".service", ".in"}:
                result.uses.update(WORD.findall(path.read_text(encoding="utf-8", errors="replace")))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT)
    unused = {each.whole_name: f"{each.path}:{each.line}" for each in found(parser.parse_args().root).unused()}
    for name in sorted(unused.keys() - KNOWN, key=unused.__getitem__):
        print(f"{unused[name]}: nobody uses {name}: take it out")
    for name in sorted(KNOWN - unused.keys()):
        print(f"{name} is used, or there no more: take it out of KNOWN")
    return 1 if unused.keys() ^ KNOWN else 0


if __name__ == "__main__":
    raise SystemExit(main())
