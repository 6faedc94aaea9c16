"""A configuration file, and the line of each of its keys: an error is to say where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.operators_file import read_operators_file
from libsym.errors import Invalid, NotFound

Key = tuple[str, ...]
"""A key of the file, or one in a table: `("weight", "alice")`."""

MAX_BYTES = 1 << 20
"""More than there is to say: what is larger is another file, or has no end."""
MAX_SHOWN = 60
"""Characters of a line that is no TOML."""
MAX_PARTS = 32
"""Of a key, with dots between them: tomllib takes memory and time by their square."""

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
"""How tomllib ends its messages."""
_TOKEN = re.compile(
    r'"{3}(?:\\.|(?!"{3}).)*+(?:"{3,5})?'
    r"|'{3}(?:(?!'{3}).)*+(?:'{3,5})?"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*|[\[{\]}=,.\n]",
    re.DOTALL,
)
"""What tells where a statement of TOML ends. A string that does not end goes on to the end of its line, or of the text.
"""


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
        statements = list(_statements(text))
        return ConfigFile(path, tomllib.loads(text), _lines_of(statements))
    except tomllib.TOMLDecodeError as error:
        found, lines = _PLACE.search(str(error)), text.removesuffix("\n").split("\n")
        line = int(found["line"]) if found and found["line"] else len(lines)
        why, shown = _PLACE.sub("", str(error)), lines[line - 1].strip()[:MAX_SHOWN]
        raise Invalid(f"{path}:{line}: no TOML: {why}, in {shown!r}") from None
    except _TooDeepError as error:
        raise Invalid(f"{path}:{error.line}: no configuration: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of a mile, or a table in a table in a table ...
        raise Invalid(f"{path}: no configuration: {error}") from None


def _text_of(path: Path) -> str:
    try:
        data = read_operators_file(path, MAX_BYTES)
    except FileNotFoundError:
        raise NotFound(f"no configuration file {path}") from None
    except Invalid:
        raise
    except OSError as error:
        raise Invalid(f"the configuration file {path} can't be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise Invalid(f"{path} has more than {MAX_BYTES} bytes: it is no configuration file")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Invalid(f"{path}:{line}: no text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


class _TooDeepError(ValueError):
    def __init__(self, line: int) -> None:
        super().__init__(f"a key of more than {MAX_PARTS} parts")
        self.line = line


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header, key with its value, comment and empty line of a TOML text, with the line that it begins in.

    tomllib tells neither, and to try which lines can be parsed takes time by the square of a long value.
    """
    line, first, begin, depth, dots = 1, 1, 0, 0, 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth, dots = depth + 1, 0
            case "]" | "}":
                depth -= 1
            case ".":
                dots += 1
                if dots >= MAX_PARTS:
                    raise _TooDeepError(line)
            case "=" | ",":
                dots = 0
            case "\n":
                line, dots = line + 1, 0
                if depth <= 0:
                    yield first, text[begin : token.end()]
                    first, begin, depth = line, token.end(), 0
            case other:
                line += other.count("\n")
    yield first, text[begin:]


def lines_of(text: str) -> dict[Key, int]:
    """The line that each key of a TOML text begins in."""
    return _lines_of(_statements(text))


def _lines_of(statements: Iterable[tuple[int, str]]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    table: Key = ()
    for line, statement in statements:
        keys = _keys(tomllib.loads(statement))
        is_header = statement.lstrip().startswith("[")
        for key in keys:
            found.setdefault(key if is_header else (*table, *key), line)
        table = keys[-1] if is_header else table
    return found


def _keys(table: Mapping[str, Any], above: Key = ()) -> list[Key]:
    keys = list[Key]()
    for name, value in table.items():
        keys.append((*above, name))
        if isinstance(value, Mapping):
            keys += _keys(value, (*above, name))
    return keys
