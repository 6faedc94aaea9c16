"""A reader of GGUF files: metadata and the location of each tensor, all checked.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | type u32 | value                    (string: length u64, UTF-8 bytes)
    tensors:  name string | dimensions u32 | sizes u64 … (fastest first) | type u32 | offset u64
    padding to `general.alignment` (32), then the tensors' data at their offsets

The file may be damaged or hostile. The reader compares every length with the bytes that are left, before it uses the
length. So it never allocates more than the size of the file. Every failure is an `Invalid` that names the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor, map_file
from libsym.errors import Invalid

Value: TypeAlias = "bool | int | float | str | list[bool] | list[int] | list[float] | list[str]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME_BYTES = 1024  # ggml itself has room for 64
_MAX_ITEMS = 1 << 22  # the largest vocabularies have 250 thousand tokens and 500 thousand merges
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {  # metadata type -> little-endian numpy type
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_TENSOR_TYPES = {  # ggml's number of the type -> name
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
    39: "MXFP4",
}
_OTHER_TYPES = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that are refused by name."""
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a GGUF file. The tensors' bytes stay in the file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the metadata. Invalid: the key is absent and has no default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._unusable(key, value, "one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unusable(key, value, "one number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._unusable(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self._unusable(key, value, "a list of strings")
        return list(map(str, value))

    def integers(self, key: str) -> list[int]:
        value = self._get(key, None)
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self._unusable(key, value, "a list of whole numbers")
        return list(map(int, value))

    def numbers(self, key: str) -> list[float]:
        value = self._get(key, None)
        if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
            raise self._unusable(key, value, "a list of numbers")
        return list(map(float, value))

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._unusable(key, value, "true or false")
        return value

    def _get(self, key: str, default: Value | None) -> Value:
        value = self.metadata.get(key, default)
        if value is None:
            raise Invalid(f"{self.path}: the metadata has no {key}: the file is incomplete, or not a language model")
        return value

    def _unusable(self, key: str, value: Value, wanted: str) -> Invalid:
        return Invalid(f"{self.path}: metadata {key} is {str(value)[:40]!r}, not {wanted}: not supported")


def read_gguf(path: Path) -> GgufFile:
    """Open and check a GGUF file. Tensor data is mapped, not read."""
    reader = _Reader(path, map_file(path))
    if bytes(reader.take(4, "the magic")) != _MAGIC:
        raise reader.invalid("does not begin with GGUF: this is not a GGUF file")
    version = reader.u32("the version")
    if version not in _VERSIONS:
        raise reader.invalid(f"has GGUF version {version}: versions 2 and 3, little-endian, are supported")
    num_tensors = reader.count("tensors", least_bytes=24)
    num_metadata = reader.count("metadata entries", least_bytes=13)
    metadata: dict[str, Value] = {}
    for _ in range(num_metadata):
        key = reader.name("a metadata key")
        if key in metadata:
            raise reader.invalid(f"has the metadata key {key!r} twice")
        metadata[key] = reader.value(key)
    entries = [reader.tensor_entry() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise reader.invalid(f"has the alignment {alignment!r}: 1 to {_MAX_ALIGNMENT} are possible")
    data_start = -(-reader.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise reader.invalid(f"has the tensor {entry.name!r} twice")
        tensors[entry.name] = reader.locate(entry, data_start)
    return GgufFile(path, metadata, tensors)


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _Reader:
    """A cursor over the file, which never moves past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.at = 0
        self._data = data

    def invalid(self, reason: str) -> Invalid:
        return Invalid(f"{self.path}: {reason}")

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > len(self._data) - self.at:
            raise self.invalid(
                f"ends within {what} ({num_bytes} bytes needed at {self.at}, {len(self._data) - self.at} left): "
                "the file is truncated or damaged"
            )
        taken = self._data[self.at : self.at + num_bytes]
        self.at += num_bytes
        return taken

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def count(self, what: str, least_bytes: int) -> int:
        """Read the number of items that follow. Invalid: so many items of `least_bytes` each exceed the file."""
        number = self.u64(f"the number of {what}")
        if number > _MAX_ITEMS or number * least_bytes > len(self._data) - self.at:
            raise self.invalid(f"claims {number} {what}, more than it can hold: the file is truncated or damaged")
        return number

    def name(self, what: str) -> str:
        """Read a string that is short enough to print."""
        name = self.string(what)
        if len(name) > _MAX_NAME_BYTES:
            raise self.invalid(f"has {what} of {len(name)} characters: the file is damaged")
        return name

    def string(self, what: str) -> str:
        data = self.take(self.u64(what), what)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.invalid(f"has {what} that is not UTF-8: the file is damaged") from error

    def value(self, key: str) -> Value:
        what = f"metadata {key!r}"
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str) -> list[bool] | list[int] | list[float] | list[str]:
        kind = self.u32(what)
        if kind == _STRING:
            return self._strings(self.count(f"strings in {what}", least_bytes=8), what)
        if kind not in _SCALARS:
            raise self.invalid(f"has {what} with elements of type {kind}: not supported")
        return self._scalars(kind, self.count(f"numbers in {what}", _SCALARS[kind].itemsize), what)

    def _scalars(self, kind: int, number: int, what: str) -> list[bool] | list[int] | list[float]:
        if kind not in _SCALARS:
            raise self.invalid(f"has {what} of the unknown type {kind}: the file is damaged or newer than this reader")
        data = self.take(number * _SCALARS[kind].itemsize, what)
        values: list[bool] | list[int] | list[float] = np.frombuffer(data, dtype=_SCALARS[kind]).tolist()
        return values

    def _strings(self, number: int, what: str) -> list[str]:
        """Read strings like `string`. Inlining is for speed: a vocabulary has hundreds of thousands of strings."""
        data, at, end = self._data, self.at, len(self._data)
        strings = []
        try:
            for _ in range(number):
                start = at + 8
                at = start + _U64.unpack_from(data, at)[0]
                if at > end:
                    raise self.invalid(f"ends within {what}: the file is truncated or damaged")
                strings.append(str(data[start:at], "utf-8"))
        except struct.error as error:
            raise self.invalid(f"ends within {what}: the file is truncated or damaged") from error
        except UnicodeDecodeError as error:
            raise self.invalid(f"has {what} with a string that is not UTF-8: the file is damaged") from error
        self.at = at
        return strings

    def tensor_entry(self) -> _TensorEntry:
        name = self.name("a tensor's name")
        dimensions = self.u32(f"tensor {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.invalid(f"has the tensor {name!r} with {dimensions} dimensions: 1 to 4 are possible")
        sizes = [self.u64(f"tensor {name!r}") for _ in range(dimensions)]
        return _TensorEntry(name, tuple(reversed(sizes)), self.u32(f"tensor {name!r}"), self.u64(f"tensor {name!r}"))

    def locate(self, entry: _TensorEntry, data_start: int) -> StoredTensor:
        """Check a tensor's type, shape and offset, and return the tensor."""
        name = _TENSOR_TYPES.get(entry.type_number)
        if name is None:
            raise self.invalid(
                f"stores {entry.name!r} as {_OTHER_TYPES.get(entry.type_number, f'ggml type {entry.type_number}')}, "
                f"which is not supported: convert it to one of {', '.join(_TENSOR_TYPES.values())}"
            )
        encoding = ENCODINGS[name]
        num_values = math.prod(entry.shape)
        if num_values == 0 or entry.shape[-1] % encoding.block_values:
            raise self.invalid(f"has the tensor {entry.name!r} of shape {entry.shape}, impossible for {name}")
        start = data_start + entry.offset
        end = start + encoding.stored_bytes(num_values)
        if end > len(self._data):
            raise self.invalid(
                f"ends within the tensor {entry.name!r} (needs {end} bytes, has {len(self._data)}): "
                "the file is truncated or damaged"
            )
        return StoredTensor(entry.name, self.path, encoding, entry.shape, self._data[start:end])
