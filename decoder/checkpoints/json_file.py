"""A reader of JSON files that other software wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decoder.checkpoints.stored import map_file
from libsym.errors import Invalid

_MAX_BYTES = 1 << 28  # the largest tokenizer.json in use is about 35 MB


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Every error names the file."""
    data = map_file(path)
    if len(data) > _MAX_BYTES:
        raise Invalid(f"{path}: is {len(data)} bytes long, too long for a description of a model")
    return parse_json_object(bytes(data), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the object in a JSON text. A duplicate key is an error; every error names `where`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise Invalid(f"{where}: the JSON is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer with too many digits
        raise Invalid(f"{where}: is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Invalid(f"{where}: holds a {type(value).__name__}, not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return table
