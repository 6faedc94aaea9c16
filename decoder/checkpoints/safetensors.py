"""A reader of safetensors checkpoints: one file, or several with an index.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}, …} | data

The reader does not read the data: tensors are views of the mapped file. The reader checks the header against the
file's size. So a damaged or hostile file leads to an `Invalid` that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoder.checkpoints.json_file import parse_json_object, read_json_object
from decoder.checkpoints.quants import CODE_ENCODINGS, ENCODINGS
from decoder.checkpoints.stored import StoredTensor, map_file
from libsym.errors import Invalid, NotFound

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
FLOAT_TYPES = ("F32", "F16", "BF16")
QUANTIZED_TYPES = (*FLOAT_TYPES, *CODE_ENCODINGS)
"""Types in quantised checkpoints."""
_ENCODINGS = ENCODINGS | CODE_ENCODINGS
_MAX_DIMENSIONS = 8


def read_safetensors(path: Path, dtypes: Sequence[str] = FLOAT_TYPES) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name. Invalid: a tensor has none of these types."""
    data = map_file(path)
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise Invalid(
            f"{path}: claims a header of {header_bytes} bytes, the file has {len(data)}: truncated or damaged"
        )
    header = parse_json_object(bytes(data[8 : 8 + header_bytes]), f"{path} (header)")
    header.pop("__metadata__", None)
    payload = data[8 + header_bytes :]
    return {name: _locate(path, name, entry, payload, dtypes) for name, entry in header.items()}


def read_checkpoint_tensors(directory: Path, dtypes: Sequence[str] = FLOAT_TYPES) -> dict[str, StoredTensor]:
    """Return the tensors in a checkpoint's directory, from `model.safetensors` or the files that the index names."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        _refuse_pickle(directory)
        return read_safetensors(directory / "model.safetensors", dtypes)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise Invalid(f"{index}: has no weight_map")
    files: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, file in weight_map.items():
        # A name with a slash could name a file in another directory.
        if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
            raise Invalid(
                f"{index}: tensor {name!r} lies in {str(file)[:80]!r}, not a safetensors file beside the index"
            )
        if file not in files:
            files[file] = read_safetensors(directory / file, dtypes)
        if name not in files[file]:
            raise NotFound(f"{directory / file}: has no tensor {name!r}, which the index says is there")
        tensors[name] = files[file][name]
    return tensors


def _refuse_pickle(directory: Path) -> None:
    """Raise Invalid if the checkpoint has its weights in a pickle alone."""
    if (directory / "model.safetensors").exists():
        return
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (directory / name).exists():
            raise Invalid(
                f"{directory / name}: the weights are in a pickle, which can run any code when it is read: convert "
                "them to model.safetensors"
            )


def _locate(path: Path, name: str, entry: Any, payload: memoryview, dtypes: Sequence[str]) -> StoredTensor:
    """Check that a tensor's dtype, shape and offsets agree, and return the tensor."""
    where = f"{path}: tensor {name[:80]!r}"
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise Invalid(f"{where} is described as {str(entry)[:80]!r}: the header is damaged")
    if dtype not in dtypes:
        raise Invalid(
            f"{where} is stored as {dtype[:20]!r}, which is not supported: convert to {', '.join(FLOAT_TYPES)}"
        )
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 < size < 1 << 48 for size in shape):
        raise Invalid(f"{where} has the impossible shape {str(shape)[:80]}")
    encoding = _ENCODINGS[dtype]
    if not 0 <= begin <= end <= len(payload):
        raise Invalid(f"{where} lies at {begin}..{end} of {len(payload)} data bytes: the file is truncated or damaged")
    if end - begin != encoding.stored_bytes(math.prod(shape)):
        raise Invalid(f"{where} of shape {shape} in {dtype} does not take {end - begin} bytes: the header is damaged")
    return StoredTensor(name, path, encoding, tuple(shape), payload[begin:end])
