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

MAX_BYTES = 1 << 20
"""More than there is to say: what is larger is another file, or has no end."""
MAX_SHOWN = 60
"""Characters of a line that is no TOML."""

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
"""How tomllib ends its messages."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What one says, unchecked."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[Key, int]
    """From 1 on."""

    def line_of(self, key: Key) -> int:
        """Where the key is given; where the first part of it that is there is, if it is not."""
        return next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), 1)

    def place_of(self, key: Key) -> str:
        """For messages."""
        return f"{self.path}:{self.line_of(key)}"


def read_config_file(path: Path) -> ConfigFile:
    """SymError: there is none, or it is no TOML; says in which line."""
    text = _text_of(path)
    try:
        return ConfigFile(path, tomllib.loads(text), lines_of(text))
    except tomllib.TOMLDecodeError as error:
        found, lines = _PLACE.search(str(error)), text.removesuffix("\n").split("\n")
        line = int(found["line"]) if found and found["line"] else len(lines)
        why, shown = _PLACE.sub("", str(error)), lines[line - 1].strip()[:MAX_SHOWN]
        raise Invalid(f"{path}:{line}: no TOML: {why}, in {shown!r}") from None
    except (ValueError, RecursionError) as error:  # a number of a mile, or a table in a table in a table ...
        raise Invalid(f"{path}: no configuration: {error}") from None


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"no configuration file {path}") from None
    except OSError as error:
        raise Invalid(f"the configuration file {path} can't be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise Invalid(f"{path} has more than {MAX_BYTES} bytes: it is no configuration file")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Invalid(f"{path}:{line}: no text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def lines_of(text: str) -> dict[Key, int]:
    """The line that each key of a TOML text begins in.

    tomllib does not tell. But a header, or a key with its value, is TOML by itself, and no beginning of it is, up to a
    line's end. So each is the fewest lines, behind those before it, that can be parsed.
    """
    found: dict[Key, int] = {}
    lines, begin = text.split("\n"), 0
    table: Key = ()
    for end in range(1, len(lines) + 1):
        try:
            keys = _keys(tomllib.loads("\n".join(lines[begin:end])))
        except tomllib.TOMLDecodeError:
            continue
        is_header = lines[begin].lstrip().startswith("[")
        for key in keys:
            found.setdefault(key if is_header else (*table, *key), begin + 1)
        table, begin = keys[-1] if is_header else table, end
    return found


def _keys(table: Mapping[str, Any], above: Key = ()) -> list[Key]:
    keys = list[Key]()
    for name, value in table.items():
        keys.append((*above, name))
        if isinstance(value, Mapping):
            keys += _keys(value, (*above, name))
    return keys
