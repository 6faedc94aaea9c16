#!/usr/bin/env python3
"""Docstrings whose first word is a pronoun without its noun: "It", "What", "Those who".

Such a sentence means nothing in help() or beside a name. The check reads docstrings of modules, classes, functions and
attributes, in the packages, the scripts and the tests, except fixtures.

`--draw` instead prints random places for a reader: docstrings, comments, and paragraphs of documents and manual pages.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvfs", "libsym", "scheduler", "symphony", "decoder", "triton_kernels", "lips")
FOLDERS = (*PACKAGES, "scripts", "tests")
DOCUMENTS = ("*.md", "man/*.[1-8]", *(f"{folder}/**/*.md" for folder in (*PACKAGES, "scripts")))
NOT_DRAWN = {"CHANGELOG.md", "results"}
COMMENTS_OF_C = re.compile(r"/\*.*?\*/", re.DOTALL)
BETWEEN_PARAGRAPHS = re.compile(r"(\n\s*\n|\n\.(?:SH|PP|P|TP|SS|IP)\b.*)")
NO_PROSE = re.compile(r"\s*(```|    |\||\.(?:EX|TH))")
"""Beginnings of figures, examples and tables."""
FIRST_WORDS = {
    *("he", "it", "its", "their", "them", "they"),
    *("one", "others", "some", "somebody"),
    *("that", "these", "this", "those"),
    *("what", "which", "who", "whoever", "whose"),
}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts of docstrings, including those of attributes."""
    bodies = [ast.parse(source).body]
    for body in bodies:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
            bodies += (getattr(statement, name, []) for name in ("body", "orelse", "handlers", "finalbody", "cases"))


def found_in(path: Path, root: Path) -> Iterator[str]:
    for line, text in docstrings(path.read_text(encoding="utf-8")):
        first = text.split(maxsplit=1)[:1]
        if first and first[0].strip("`*,.:;").lower() in FIRST_WORDS:
            yield f"{path.relative_to(root)}:{line}: {text.strip().partition(chr(10))[0]}"


def places(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and text of each place of prose. Tests and the change log are left out."""
    for folder in (*PACKAGES, "scripts"):
        for path in sorted((root / folder).rglob("*.[pch]*")):
            if path.suffix == ".py":
                source = path.read_text(encoding="utf-8")
                yield from ((path, *each) for each in (*docstrings(source), *comments(source)))
            elif path.suffix in (".c", ".h") and not path.name.startswith("_"):
                source = path.read_text(encoding="utf-8")
                for found in COMMENTS_OF_C.finditer(source):
                    yield path, source.count("\n", 0, found.start()) + 1, found[0]
    for path in sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)}):
        if not NOT_DRAWN & set(path.relative_to(root).parts):
            yield from ((path, *each) for each in paragraphs(path.read_text(encoding="utf-8")))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Return the line and text of each comment in Python.

    Consecutive lines are one comment. Directives are left out.
    """
    found = list[tuple[int, list[str]]]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(!|noqa|type:|fmt:|mypy:)", token.string):
            if not found or found[-1][0] + len(found[-1][1]) != token.start[0]:
                found.append((token.start[0], []))
            found[-1][1].append(token.string)
    return ((line, "\n".join(texts)) for line, texts in found)


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a document or manual page that have eight words or more."""
    line = 1
    for text in BETWEEN_PARAGRAPHS.split(source):
        if len(text.split()) >= 8 and not NO_PROSE.match(text):
            yield line + (text[0] == "\n"), text.strip()
        line += text.count("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Find docstrings that begin without their subject.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--draw", type=int, metavar="NUM", help="print NUM places for a reader, drawn by the seed")
    parser.add_argument("--seed", type=int, default=60)
    parser.add_argument("--below", default="", metavar="PREFIX", help="draw only from paths with this prefix")
    args = parser.parse_args()
    if args.draw is not None and args.draw < 1:
        parser.error("--draw: a positive number is needed")
    root: Path = args.root
    if args.draw:
        drawn = [each for each in places(root) if str(each[0].relative_to(root)).startswith(args.below)]
        for path, line, text in random.Random(args.seed).sample(drawn, min(args.draw, len(drawn))):
            print(f"---- {path.relative_to(root)}:{line}\n{text}")
        return
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py") if "fixtures" not in path.parts)
    found = [line for path in paths for line in found_in(path, root)]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
