"""Mutants of Python, found in the syntax tree, and of C, found in the text without comments and strings."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A small change to one place of a file."""

    file: str
    line: int
    first_line: int
    """First line of the statement."""
    is_in_function: bool
    """Whether the code is in a function. Other code runs when the file is loaded, and may affect any test."""
    begin: int
    end: int
    old: str
    new: str

    def text(self) -> bytes:
        source = Path(self.file).read_bytes()
        return source[: self.begin] + self.new.encode() + source[self.end :]


def chosen(files: list[str], num: int, seed: int) -> list[Mutant]:
    """Pick mutants. All lines are divided into `num` parts, and each part gives one mutant. The order is random."""
    draw = random.Random(seed)
    left, num_lines = list[tuple[int, Mutant]](), 0
    for file in files:
        left += [(num_lines + mutant.line, mutant) for mutant in mutants_of(file)]
        num_lines += Path(file).read_bytes().count(b"\n")
    picked = list[Mutant]()
    for part in range(num):
        at = num_lines * (part + draw.random()) / num
        nearest = min((line for line, _ in left), key=lambda line: abs(line - at))
        found = draw.choice([each for each in left if each[0] == nearest])
        left.remove(found)
        picked.append(found[1])
    draw.shuffle(picked)
    return picked


def mutants_of(file: str) -> list[Mutant]:
    source = Path(file).read_bytes()
    return list(_C(file, source).all() if file.endswith(".c") else _Python(file, source).all())


# ---- Python

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"),
}  # fmt: skip
LIMITS = {"min": "max", "max": "min"}
NOT_MUTATED = (ast.JoinedStr, ast.Assert)
"""Code that is never mutated: messages, and assertions of invariants, whose change no test can notice."""


class _Python:
    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
        self._statement: ast.stmt = ast.Pass(lineno=1)
        self._is_in_function = False

    def all(self) -> Iterator[Mutant]:
        yield from self._below(ast.parse(self._source))

    def _below(self, node: ast.AST) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            before = self._is_in_function
            self._is_in_function |= name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                    yield from self._at(each)
            self._is_in_function = before

    def _at(self, node: ast.AST) -> Iterator[Mutant]:
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        if not isinstance(node, NOT_MUTATED):
            yield from self._changes(node)
            yield from self._below(node)
        self._statement = before

    def _changes(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(ops=[each], left=left, comparators=[right]) if type(each) in OPERATORS:
                yield self._between(left, right, *OPERATORS[type(each)])
            case ast.BoolOp(op=each, values=values):
                for left, right in pairwise(values):
                    yield self._between(left, right, *OPERATORS[type(each)])
            case ast.BinOp(op=ast.Add() | ast.Sub() as each, left=left, right=right):
                yield self._between(left, right, *OPERATORS[type(each)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._mutant(self._span(node)[0], self._span(operand)[0], "not", "")
            case ast.Constant(value=bool() as value):
                yield self._whole(node, str(not value))
            case ast.Constant(value=int() as value):
                yield self._whole(node, str(value + 1))
            case ast.Call(func=ast.Name(id="min" | "max") as name):
                yield self._whole(name, LIMITS[name.id])
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._whole(value, "None")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
                yield self._whole(node, "pass")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield self._whole(test, "True")
                yield self._whole(test, "False")
            case ast.Break():
                yield self._whole(node, "continue")
            case ast.Continue():
                yield self._whole(node, "break")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.stmt | ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _whole(self, node: ast.AST, new: str) -> Mutant:
        return self._mutant(*self._span(node), None, new)

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Mutant:
        """Return a mutant of the operator between two operands, with or without brackets around them."""
        return self._mutant(self._span(left)[1], self._span(right)[0], old, new)

    def _mutant(self, begin: int, end: int, old: str | None, new: str) -> Mutant:
        """Return a mutant of the text from `begin` to `end`. With `old`, only this part of the text is replaced."""
        if old is not None:
            begin = self._source.index(old.encode(), begin, end)
            end = begin + len(old)
        line = self._source.count(b"\n", 0, begin) + 1
        old, first_line = self._source[begin:end].decode(), self._statement.lineno
        return Mutant(self._file, line, first_line, self._is_in_function, begin, end, old, new)


# ---- C

REPLACED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
    "++": "--", "--": "++", "+=": "-=", "-=": "+=", "!": "", "break": "continue", "continue": "break",
}  # fmt: skip
NOT_C = re.compile(rb"""//.*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^ *\#(?:\\\n|.)*""", re.MULTILINE)
TOKENS = re.compile(
    rb"(?m)^ +(?P<statement>(?!return\b|if\b|for\b|while\b|switch\b)\*?\w[\w.>\[\]-]*(?: [-+|&*/]?= |\()[^;{}]*;)"
    rb"|(?<= )(?P<operator><=?|>=?|[=!]=|&&|\|\||[-+]=?)(?= )"
    rb"|(?P<prefix>\+\+|--|!(?!=)|\b(?:break|continue)\b)|(?P<number>(?<![\w.])[0-9]+(?![\w.]))"
)


class _C:
    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._text = NOT_C.sub(lambda found: re.sub(rb"[^\n]", b" ", found[0]), source)

    def all(self) -> Iterator[Mutant]:
        at = 0
        while found := TOKENS.search(self._text, at):
            kind, old = found.lastgroup, found[found.lastgroup or 0].decode()
            begin, end = found.span(kind or 0)
            at = begin + 1 if kind == "statement" else end  # the other tokens of this statement can still be mutated
            new = str(int(old) + 1) if kind == "number" else REPLACED.get(old, ";")
            line = self._text.count(b"\n", 0, begin) + 1
            top = self._text.rindex(b"\n", 0, begin)
            while self._text[top + 1 : top + 2] in b" }\n#":
                top = self._text.rindex(b"\n", 0, top)
            yield Mutant(self._file, line, line, b"(" in self._text[top:begin].partition(b"{")[0], begin, end, old, new)
