"""Writes `libsym/_abi.py`: the definitions of `abi.h` for Python. setup.py runs this script; run it after an edit.

`enum sym_op` becomes the class Op. Its members lose their common prefix. Other enums become classes, too. Flags become
constants, because several flags have the same value. `struct sym_mask` becomes MASK_STRUCT, a `struct.Struct`.
"""

from __future__ import annotations

import re
import struct
from os.path import commonprefix
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = (HERE / "abi.h", HERE / "steps.h")
MODULE = HERE / "_abi.py"

FORMATS = {"uint16_t": "H", "int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f"}
FORMATS["double"] = "d"

# Only C uses struct sym_region and the bytes reserved for it. Python's HEADER_BYTES is the size of a frame's header.
NOT_FOR_PYTHON = {"SYM_HEADER_BYTES", "region"}

DEFINE = re.compile(r"^#define (SYM_\w+) +(\S.*?)(?: +/\* (.*?) \*/)?$", re.MULTILINE)
ENUM = re.compile(r"^(?:/\* ([^\n]*) \*/\n)?enum sym_(\w+) \{(.*?)\}", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(SYM_\w+) = (\d+),?(?: +/\* (.*?) \*/)?")
STRUCT = re.compile(r"^struct sym_(\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELDS = re.compile(r"^ +(\w+) ([^;]+);", re.MULTILINE)


def module(header: str, steps: str = "") -> str:
    """Return the text of `libsym/_abi.py`. `header` is the text of abi.h, and `steps` is the text of steps.h."""
    parts = [
        '"""Definitions of abi.h, written by abi_build.py, not to be edited."""\n',
        "import enum as _enum\nimport struct as _struct\n",
        *(f"{_plain(name)} = {_number(value)}{_words(words)}" for name, value, words in _defines(header + steps)),
        *(_flags(body) for _, name, body in ENUM.findall(header) if name.endswith("flag")),
        *(_struct(name, body) for name, body in STRUCT.findall(header) if name not in NOT_FOR_PYTHON),
        *(_enum(*found) for found in ENUM.findall(header) if not found[1].endswith("flag")),
    ]
    return "\n".join(parts) + "\n"


def _defines(header: str) -> list[tuple[str, str, str]]:
    return [found for found in DEFINE.findall(header) if found[0] not in NOT_FOR_PYTHON]


def _flags(body: str) -> str:
    return "\n".join(f"{_plain(name)} = {value}{_words(words)}" for name, value, words in _numbers(body))


def _enum(title: str, name: str, body: str) -> str:
    numbers = _numbers(body)
    shared = commonprefix([each for each, _, _ in numbers])  # noqa: RUF071 - of names, letter by letter
    shared = shared[: shared.rindex("_") + 1]
    members = [f"    {each.removeprefix(shared)} = {value}{_words(words)}" for each, value, words in numbers]
    words = [f'    """{title}"""\n'] if title else []
    return "\n".join([f"\n\nclass {name.title().replace('_', '')}(_enum.IntEnum):", *words, *members])


def _numbers(body: str) -> list[tuple[str, str, str]]:
    """Return the members of an enum: name, value, comment."""
    found = NUMBER.findall(body)
    assert len(found) == _code(body).count("SYM_"), f"not all of these are written as `SYM_NAME = 1,`: {body}"
    return found


def _struct(name: str, body: str) -> str:
    found, names = "", list[str]()
    for kind, declared in FIELDS.findall(_code(body)):
        for field in declared.split(","):
            _, _, count = field.strip().rstrip("]").partition("[")
            found += FORMATS[kind] * int(count or 1)
            names.append(field.strip())
    assert struct.calcsize("=" + found) == struct.calcsize("@" + found), f"struct sym_{name} has padding: name it"
    return f'{name.upper()}_STRUCT = _struct.Struct("={found}")  # {", ".join(names)}'


def _code(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def _plain(name: str) -> str:
    return name.removeprefix("SYM_")


def _words(comment: str) -> str:
    return f"  # {comment}" if comment else ""


def _number(text: str) -> int:
    """Return the value of a C expression of whole numbers."""
    text = text.replace("INT64_MAX", str((1 << 63) - 1))
    assert re.fullmatch(r"[\s()x0-9a-fA-Fu<-]+", text), f"{text} is no number that abi_build.py knows"
    return int(eval(re.sub(r"(?<=[0-9a-fA-F])u\b", "", text)))  # noqa: S307 - digits, shifts and parentheses


if __name__ == "__main__":
    MODULE.write_text(module(*(header.read_text(encoding="utf-8") for header in HEADERS)), encoding="utf-8")
