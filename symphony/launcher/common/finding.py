"""Lookup of the program that a word on the command line names: a file, or a program that ships with Symphony."""

from __future__ import annotations

import ast
import difflib
import os
import stat
from pathlib import Path

from symphony.launcher.common.places import Refused
from symphony.launcher.common.statuses import NOT_FOUND, NOT_READABLE
from symphony.launcher.common.surroundings import ROOT

SHIPPED = Path(ROOT) / "lips"
PURPOSES = {
    "Basics": ("completion", "ask", "chat", "compact", "batch", "score", "prefix", "prefix_tree", "mapreduce"),
    "Caches": ("modular", "rag", "editor", "windowed", "sink", "h2o", "snapkv", "tova"),
    "Decoding": (
        *("beam", "best_of_n", "ngram", "jacobi", "tree_speculation", "constrained", "smc", "healing", "contrastive"),
        *("cfg", "cad", "watermark", "gumbel", "samplers"),
    ),
    "Reasoning": (
        *("cot", "tree_of_thought", "graph_of_thought", "skeleton_of_thought", "recursion_of_thought", "mcts"),
        *("reflexion", "self_consistency", "rlm"),
    ),
    "Agents": ("react", "codeact", "swarm", "debate", "async_tools", "mcp_client"),
    "Servers": ("gateway",),
}
"""Programs that ship with Symphony, by purpose, in the order of lips(7)."""


def shipped() -> dict[str, Path]:
    """Return the programs that ship, by name. A program is a file, or the `__main__.py` of a package."""
    files = {path.stem: path for path in SHIPPED.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name: path for path in SHIPPED.glob("*/__main__.py")}
    return dict(sorted((files | packages).items()))


def shipped_lines() -> list[str]:
    """Return lines with the programs that ship, each with its purpose, under headings."""
    programs = shipped()
    width, lines = max(map(len, programs)), list[str]()
    for heading, names in PURPOSES.items():
        lines += ["", heading, *(f"  {name:{width}}  {_purpose(programs[name])}" for name in names)]
    return lines[1:]


def _purpose(path: Path) -> str:
    path = path.with_name("__init__.py") if path.stem == "__main__" else path
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return text.partition("\n")[0]


def name_of(path: str) -> str:
    """Return the name of a program: the stem of its file, or for a `__main__.py` the name of its package."""
    file = Path(path)
    return file.parent.name if file.name == "__main__.py" else file.stem


def does_without_sandbox(path: str) -> bool:
    """Return whether a program that ships must run without a sandbox, for instance because it listens on a port.
    The package of such a program says `ISOLATION = "none"`.
    """
    if Path(path) not in shipped().values() or Path(path).name != "__main__.py":
        return False
    for line in ast.parse(Path(path).with_name("__init__.py").read_bytes()).body:
        match line:
            case ast.Assign([ast.Name("ISOLATION")], ast.Constant("none")):
                return True
    return False


def find_program(word: str, directory: str) -> tuple[str, bool]:
    """Return the path of a program's file, and whether it is Python. A word that is a path is returned unchanged.
    Refused: there is no such program.
    """
    if _is_there(directory, word):
        return word, word.endswith(".py")
    found = shipped().get(word)
    if found is not None:
        return str(found), True
    raise Refused(_not_found(word), NOT_FOUND)


def _is_there(directory: str, word: str) -> bool:
    try:
        found = os.stat(os.path.join(directory, word) if word else word)  # noqa: PTH116, PTH118 - joined, "" would name the directory
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise Refused(f"{word}: {getattr(error, 'strerror', None) or error}", NOT_READABLE) from None
    if stat.S_ISDIR(found.st_mode):
        if word in shipped():
            return False
        raise Refused(f"{word}: is a directory", NOT_READABLE)
    return True


def _not_found(word: str) -> str:
    if "/" in word or word.endswith(".py"):
        return f"no program {word}: there is no such file"
    if near := difflib.get_close_matches(word, shipped(), n=1):
        return f"no program {word}: did you mean {near[0]}?"
    return f"no program {word}: it is no file here, and Symphony ships {', '.join(shipped()) or 'none'}"
