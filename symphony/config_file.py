"""A configuration file, and the line of each of its keys: an error is to say where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libsym.errors import Invalid, NotFound

Key = tuple[str, ...]
"""A key of the file, or one in a table: `("weight", "alice")`."""

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
"""How tomllib ends its messages."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What one says, unchecked."""

    path: Path
    text: str
    values: dict[str, Any]

    def line_of(self, key: Key) -> int:
        """Where the key is given; where the first part of it is that is there, if it is not. From 1 on."""
        lines = lines_of(self.text)
        return next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)

    def place_of(self, key: Key) -> str:
        """For messages."""
        return f"{self.path}:{self.line_of(key)}"


def read_config_file(path: Path) -> ConfigFile:
    """SymError: there is none, or it is no TOML; says in which line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"no configuration file {path}") from None
    except OSError as error:
        raise Invalid(f"the configuration file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    try:
        return ConfigFile(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.search(str(error))
        line = (found and found["line"]) or max(1, len(text.splitlines()))
        raise Invalid(f"{path}:{line}: no TOML: {_PLACE.sub('', str(error))}") from None


def lines_of(text: str) -> dict[Key, int]:
    """The line that each key of a TOML text begins in.

    tomllib does not tell. But the lines before any line are TOML by themselves exactly if no value goes on from the one
    into the other. So what is new in the shortest such beginning that has a key began where the one before it ended.
    """
    found: dict[Key, int] = {}
    lines, end = [f"{line}\n" for line in text.split("\n")], 0
    for number in range(1, len(lines) + 1):
        if number - end == 1 and not lines[end].partition("#")[0].strip():
            end = number  # an empty line, or a comment
            continue
        try:
            table = tomllib.loads("".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue
        for key in _keys(table):
            found.setdefault(key, end + 1)
        end = number
    return found


def _keys(table: Mapping[str, Any], above: Key = ()) -> list[Key]:
    keys = list[Key]()
    for name, value in table.items():
        keys.append((*above, name))
        if isinstance(value, Mapping):
            keys += _keys(value, (*above, name))
    return keys
