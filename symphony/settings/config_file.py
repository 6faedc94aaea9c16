"""Reading of a configuration file, with the line of each key, so that errors can name it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.base.operators_file import read_operators_file
from libsym.errors import Invalid, NotFound

Key = tuple[str, ...]
"""Path of a key in the file, through its tables: `("weight", "alice")`."""

MAX_BYTES = 1 << 20
"""Size limit of a configuration file. A larger file is a mistake, such as a device without an end."""
MAX_SHOWN = 60
"""Maximum number of characters of an invalid line that a message shows."""
MAX_PARTS = 32
"""Upper bound of the parts of a dotted key: the memory and time of tomllib grow with the square of this number."""

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
"""Position that tomllib appends to its messages."""
_TOKEN = re.compile(
    r'"{3}(?:\\.|(?!"{3}).)*+(?:"{3,5})?'
    r"|'{3}(?:(?!'{3}).)*+(?:'{3,5})?"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*|[\[{\]}=,.\n]",
    re.DOTALL,
)
"""Token of TOML, as far as needed to find the end of a statement.
An unterminated string extends to the end of its line, or of the text.
"""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Values of a configuration file, before they are checked."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[Key, int]
    """Line of each key; the first line is 1."""

    def line_of(self, key: Key) -> int:
        """Return the line of a key. A key that is missing gets the line of its longest prefix in the file, or 1."""
        return next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), 1)

    def place_of(self, key: Key) -> str:
        """Return the file and line of a key, for messages."""
        return f"{self.path}:{self.line_of(key)}"


def read_config_file(path: Path) -> ConfigFile:
    """Read a configuration file. SymError: the file is missing, or is not TOML; the message names the line."""
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
    except (ValueError, RecursionError) as error:  # a number with too many digits, or tables nested too deep
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
    """Yield the statements of a TOML text (headers, keys with values, comments, empty lines), each with its first line.

    tomllib does not report statements. To try which ranges of lines can be parsed would take time proportional to the
    square of a value's length.
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
    """Return the line in which each key of a TOML text begins."""
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
