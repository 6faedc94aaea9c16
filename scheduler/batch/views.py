"""Conversion of records and arrays between C and numpy. Types come from the headers, not from a copy in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from decoder.batch import IntArray
from scheduler._loop import ffi

_NUMBERS = {"int32_t": "i4", "int64_t": "i8", "double": "f8"}


def dtype_of(record: str) -> np.dtype[np.void]:
    """Return the dtype of a C struct. Fields of structs within it become fields of the dtype."""
    names, formats, offsets = zip(*_fields(ffi.typeof(record), 0), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(record)})


def _fields(record: Any, at: int) -> Iterator[tuple[str, Any, int]]:
    for name, field in record.fields:
        kind, offset = field.type, at + field.offset
        if kind.kind == "struct":
            yield from _fields(kind, offset)
        elif kind.kind == "array":
            yield name, (_NUMBERS[kind.item.cname], (kind.length,)), offset
        else:
            yield name, _NUMBERS[kind.cname], offset


def ints(array: IntArray) -> Any:
    """Return the array as a C array of int32_t, without a copy."""
    return ffi.from_buffer("int32_t[]", array)
