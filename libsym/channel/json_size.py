"""The size that a JSON text will have when it is parsed, measured before parsing."""

from __future__ import annotations

from dataclasses import dataclass

from libsym._channel import ffi, lib


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Size of a JSON text. The numbers are upper bounds, also for bytes that are not JSON."""

    num_values: int
    """Number of objects, lists, texts, names, numbers, and words such as null."""
    depth: int
    """Greatest nesting depth of lists and objects."""
    too_large: int | None
    """Offset of the first number that is too large for a double. None: no number is too large."""


def json_size(text: bytes) -> JsonSize:
    """Return the size of a JSON text. Other threads can run in the meantime.

    >>> json_size(b'{"a": [1, "[2]", 1e999]}')
    JsonSize(num_values=6, depth=2, too_large=17)
    """
    found = ffi.new("sym_json_size *")
    lib.sym_json_measure(text, len(text), found)
    return JsonSize(found.num_values, found.depth, None if found.too_large < 0 else found.too_large)
