"""Quantised checkpoints of Hugging Face: `quantization_config` of `config.json`, and the tensors of each matrix.

awq                 `qweight` and `qzeros` pack output features in the order 0 2 4 6 1 3 5 7; `scales`
gptq                `qweight` packs inputs and `qzeros` output features; `scales`; `g_idx` is the group of each input.
                    A zero is stored minus 1, except in the format gptq_v2
compressed-tensors  pack-quantized: `weight_packed` packs inputs and `weight_zero_point` output features;
                    `weight_scale`, `weight_shape`, `weight_g_idx`. int-quantized, float-quantized: `weight` has int8
                    or float8
fp8                 `weight` has float8; `weight_scale_inv` or `weight_scale`

awq and gptq store matrices as `[in, out]`, the others as `[out, in]`. Scales of activations are not read: activations
have the precision of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from decoder.batch import IntArray
from decoder.checkpoints.coded_matrix import CodedMatrix, PackedNumbers, Words
from decoder.checkpoints.quants import E4M3_LEVELS, FP8, GROUP_VALUES, Float32Array, grouped, unpacked
from decoder.checkpoints.safetensors import FLOAT_TYPES
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Tensor
from libsym.errors import Invalid

Json: TypeAlias = dict[str, Any]
Shape: TypeAlias = "tuple[int | None, ...]"

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "activation_scale"})
"""Last parts of the names of tensors that only scale activations."""
_PARTS = frozenset(
    {
        *("qweight", "qzeros", "scales", "g_idx", "bias"),
        *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"),
        *("weight_g_idx", *_ACTIVATIONS),
    }
)
_INTEGERS = np.arange(256, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The object `quantization_config`, or an object in it."""

    path: Path
    prefix: str
    """Keys that lead to the object, each with a dot."""
    values: Json

    def get(self, key: str, default: Any, *possible: Any) -> Any:
        """Return a value. Invalid: it is none of `possible`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in possible):
            raise self.refuse(key, value, possible)
        return value

    def size(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.refuse(key, value, ["whole numbers above 0"])
        return value

    def group_size(self, key: str) -> int | None:
        """Return the inputs of a group; None: all inputs of a row."""
        return None if self.values.get(key) == -1 else self.size(key)

    def within(self, key: str) -> _Settings:
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refuse(key, value, ["objects"])
        return _Settings(self.path, f"{self.prefix}{key}.", value)

    def forbid(self, *keys: str) -> None:
        """Refuse keys that would change the results."""
        for key in keys:
            if self.values.get(key):
                raise self.refuse(key, self.values[key], ["files without it"])

    def refuse(self, key: str, value: Any, known: Any) -> Invalid:
        found = repr(f"{self.prefix[:80]}{key} = {str(value)[:80]}")[1:-1]  # without new lines
        return Invalid(f"{self.path}: {found} is not supported: {', '.join(map(str, known))} are")


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of a module, by the last part of their names."""

    name: str
    tensors: Mapping[str, StoredTensor]

    def take(self, part: str, dtypes: tuple[str, ...], *shapes: Shape) -> StoredTensor:
        """Return a tensor of one of the shapes, in which None is any size. Invalid: there is no such tensor."""
        stored = self.tensors.get(part)
        if stored is None:
            file = next(iter(self.tensors.values())).file
            name = f"{self.name[:80]}.{part}"
            raise Invalid(f"{file}: the tensor {name!r} is missing: the checkpoint is incomplete")
        if stored.encoding.name not in dtypes:
            raise self.refuse(part, f"is stored as {stored.encoding.name}, not as {' or '.join(dtypes)}")
        if not any(_fits(stored.shape, shape) for shape in shapes):
            wanted = " or ".join(str(["any" if size is None else size for size in shape]) for shape in shapes)
            raise self.refuse(part, f"has the shape {list(stored.shape)}, not {wanted} as the configuration says")
        return stored

    def refuse(self, part: str, reason: str) -> Invalid:
        stored = self.tensors[part]
        return Invalid(f"{stored.file}: tensor {stored.name[:80]!r} {reason}")


def _fits(found: tuple[int, ...], shape: Shape) -> bool:
    return len(found) == len(shape) and all(size in {None, each} for each, size in zip(found, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint is quantised."""

    codes: str
    """Last part of the name of each tensor of codes."""
    build: Callable[[_Module], CodedMatrix]

    def matrices(self, tensors: Mapping[str, StoredTensor], known: frozenset[str]) -> dict[str, Tensor]:
        """Return all tensors, with one matrix NAME.weight in place of those of a quantised module.

        Left out are scales of activations, and biases of zeros that are not `known` to the family: AutoGPTQ writes
        them.
        """
        modules: dict[str, dict[str, StoredTensor]] = {}
        found: dict[str, Tensor] = {}
        for name, stored in tensors.items():
            module, _, part = name.rpartition(".")
            if part in _PARTS:
                modules.setdefault(module, {})[part] = stored
            else:
                found[name] = stored
        for name, parts in modules.items():
            left = dict(parts)
            if self.codes in parts and not (self.codes == "weight" and parts["weight"].encoding.name in FLOAT_TYPES):
                matrix = self.build(_Module(name, parts))
                taken = set(map(id, matrix.parts))
                for part, each in parts.items():
                    if id(each) in taken or _is_idle(part, each, known):
                        del left[part]
                found[f"{name}.weight"] = matrix
            found |= {f"{name}.{part}": each for part, each in left.items()}
        for name, tensor in found.items():
            if isinstance(tensor, StoredTensor) and tensor.encoding.name not in FLOAT_TYPES:
                kind = tensor.encoding.name
                raise Invalid(f"{tensor.file}: tensor {name[:80]!r} holds {kind}, and its module has no codes")
        return found


def _is_idle(part: str, stored: StoredTensor, known: frozenset[str]) -> bool:
    """Return whether a tensor that no matrix has read has no effect."""
    may_be_zero = part == "weight_zero_point" or (part == "bias" and stored.name not in known)
    return part in _ACTIVATIONS or (may_be_zero and not np.frombuffer(stored.data, np.uint8).any())


def read_quantization(values: Json, path: Path) -> Quantization | None:
    """Return how the checkpoint of this `config.json` is quantised. None: it is not. Invalid: no such file is read."""
    if values.get("quantization_config") is None:
        return None
    settings = _Settings(path, "", values).within("quantization_config")
    return _METHODS[settings.get("quant_method", None, *_METHODS)](settings)


def _read_awq(settings: _Settings) -> Quantization:
    settings.get("bits", settings.values.get("w_bit"), 4)
    settings.get("version", settings.values.get("format") or "gemm", "gemm", "GEMM")
    has_zeros = settings.get("zero_point", True, True, False)
    key = "group_size" if "group_size" in settings.values else "q_group_size"
    return Quantization("qweight", partial(_awq, settings.group_size(key), has_zeros))


def _awq(group: int | None, has_zeros: bool, module: _Module) -> CodedMatrix:
    codes = module.take("qweight", ("I32",), (None, None))
    inputs, outputs = codes.shape[0], 8 * codes.shape[1]
    block = 1, group or inputs
    num_groups = -(-inputs // block[1])
    scales = module.take("scales", FLOAT_TYPES, (num_groups, outputs))
    zeros = None
    if has_zeros or "qzeros" in module.tensors:
        stored = module.take("qzeros", ("I32",), (num_groups, codes.shape[1]))
        zeros = stored, PackedNumbers(_words(stored).T, 4, _AWQ_PLACES, along_rows=True)
    return _matrix(
        *("AWQ", (outputs, inputs), block),
        codes=(codes, PackedNumbers(_words(codes).T, 4, _AWQ_PLACES, along_rows=True)),
        scales=(scales, _words(scales).T),
        zeros=zeros,
        zero=None if has_zeros else 8,
    )


def _read_gptq(settings: _Settings) -> Quantization:
    settings.forbid("dynamic", "adapter", "rotation", "is_marlin_format")
    settings.get("pack_dtype", "int32", "int32")
    bits = settings.get("bits", None, 4, 8)
    form = settings.get("checkpoint_format", settings.values.get("format") or "gptq", "gptq", "gptq_v2")
    zero = 1 << (bits - 1) if settings.get("sym", False, True, False) else None
    is_ordered = settings.get("desc_act", False, True, False)
    return Quantization("qweight", partial(_gptq, bits, settings.group_size("group_size"), zero, form, is_ordered))


def _gptq(bits: int, group: int | None, zero: int | None, form: str, is_ordered: bool, module: _Module) -> CodedMatrix:
    places = tuple(range(32 // bits))
    codes = module.take("qweight", ("I32",), (None, None))
    inputs, outputs = len(places) * codes.shape[0], codes.shape[1]
    block = 1, group or inputs
    num_groups = -(-inputs // block[1])
    scales = module.take("scales", FLOAT_TYPES, (num_groups, outputs))
    zeros = module.take("qzeros", ("I32",), (num_groups, -(-outputs // len(places))))
    # The format gptq stores each word of zeros minus a word of ones, as one subtraction with borrows.
    added = 0 if form == "gptq_v2" else sum(1 << bits * place for place in places)
    return _matrix(
        *(form.upper(), (outputs, inputs), block),
        codes=(codes, PackedNumbers(_words(codes).T, bits, places, along_rows=False)),
        scales=(scales, _words(scales).T),
        zeros=(zeros, PackedNumbers(_words(zeros).T, bits, places, along_rows=True, added=added)),
        zero=zero,
        groups=_groups(module, "g_idx", inputs, block[1]) if is_ordered or "g_idx" in module.tensors else None,
    )


def _read_compressed(settings: _Settings) -> Quantization:
    settings.forbid("kv_cache_scheme", "transform_config")
    if (settings.values.get("sparsity_config") or {}) != {}:
        settings.within("sparsity_config").get("format", "dense", "dense")
    form = settings.get("format", None, "pack-quantized", "int-quantized", "float-quantized")
    schemes = settings.within("config_groups")
    groups = [schemes.within(key) for key in schemes.values]
    for group in groups:
        group.forbid("output_activations")
        group.get("format", form, form)
    found = [_read_scheme(form, group.within("weights")) for group in groups]
    if not found or any(each != found[0] for each in found):
        raise settings.refuse("config_groups", list(schemes.values), ["groups of equal weights"])
    return Quantization("weight_packed" if form == "pack-quantized" else "weight", partial(_compressed, found[0]))


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A scheme of compressed-tensors."""

    form: str
    bits: int
    is_symmetric: bool
    strategy: str
    block: tuple[int, int] | None
    """Rows and inputs of a block. None: a whole row or matrix, as the strategy says."""
    is_ordered: bool


def _read_scheme(form: str, weights: _Settings) -> _Scheme:
    is_float = form == "float-quantized"
    weights.get("type", "int", "float" if is_float else "int")
    weights.get("dynamic", False, False)
    strategies = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    strategy = weights.get("strategy", None, *strategies[form == "pack-quantized" :])
    block = None
    if strategy == "group":
        block = 1, weights.size("group_size")
    if strategy == "block":
        block = _block(weights, "block_structure")
    return _Scheme(
        form,
        bits=weights.get("num_bits", 8, *((4, 8) if form == "pack-quantized" else (8,))),
        is_symmetric=weights.get("symmetric", True, True, *(() if is_float else (False,))),
        strategy=strategy,
        block=block,
        is_ordered=weights.get("actorder", False, False, True, "group", "dynamic", "weight", "static")
        in (True, "group", "dynamic"),
    )


def _block(settings: _Settings, key: str) -> tuple[int, int]:
    match settings.values.get(key):
        case [int(rows), int(inputs)] if 0 < rows < 1 << 31 and 0 < inputs < 1 << 31:
            return rows, inputs
        case other:
            raise settings.refuse(key, other, ["two whole numbers above 0"])


def _compressed(scheme: _Scheme, module: _Module) -> CodedMatrix:
    if scheme.form == "float-quantized":
        return _float8(module, "weight_scale", scheme.strategy, scheme.block)
    is_packed = scheme.form == "pack-quantized"
    places = tuple(range(32 // scheme.bits)) if is_packed else (0,)
    others = []
    if is_packed:
        others.append(module.take("weight_shape", ("I64",), (2,)))
        outputs, inputs = np.frombuffer(others[0].data, "<i8").tolist()
        codes = module.take("weight_packed", ("I32",), (outputs, -(-inputs // len(places))))
    else:
        codes = module.take("weight", ("I8",), (None, None))
        outputs, inputs = codes.shape
    added = 0 if is_packed else 128
    block = _block_of(scheme.strategy, scheme.block, (outputs, inputs))
    scales, table = _take_table(module, "weight_scale", FLOAT_TYPES, (outputs, inputs), block)
    zeros = None
    if not scheme.is_symmetric and is_packed:
        stored = module.take("weight_zero_point", ("I32",), (-(-outputs // len(places)), table.shape[1]))
        zeros = stored, PackedNumbers(_words(stored), scheme.bits, places, along_rows=True)
    elif not scheme.is_symmetric:
        stored, words = _take_table(module, "weight_zero_point", ("I8",), (outputs, inputs), block)
        zeros = stored, PackedNumbers(words, 8, places, along_rows=False, added=added)
    return _matrix(
        *("compressed-tensors", (outputs, inputs), block),
        codes=(codes, PackedNumbers(_words(codes), scheme.bits, places, along_rows=False, added=added)),
        scales=(scales, table),
        zeros=zeros,
        zero=1 << (scheme.bits - 1) if scheme.is_symmetric else None,
        groups=_groups(module, "weight_g_idx", inputs, block[1])
        if scheme.is_ordered or "weight_g_idx" in module.tensors
        else None,
        others=tuple(others),
    )


def _read_fp8(settings: _Settings) -> Quantization:
    settings.forbid("kv_cache_scheme", "store_dtype")
    settings.get("fmt", "e4m3", "e4m3")
    has_blocks = settings.values.get("weight_block_size") is not None
    return Quantization("weight", partial(_fp8, _block(settings, "weight_block_size") if has_blocks else None))


def _fp8(block: tuple[int, int] | None, module: _Module) -> CodedMatrix:
    part = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
    scales = module.take(part, FLOAT_TYPES, (), (None,), (None, None))
    strategy = "block" if block else "tensor" if scales.data.nbytes == scales.encoding.block_bytes else "channel"
    return _float8(module, part, strategy, block)


def _float8(module: _Module, part: str, strategy: str, size: tuple[int, int] | None) -> CodedMatrix:
    codes = module.take("weight", ("F8_E4M3",), (None, None))
    outputs, inputs = codes.shape
    block = _block_of(strategy, size, (outputs, inputs))
    return _matrix(
        *(FP8, (outputs, inputs), block),
        codes=(codes, PackedNumbers(_words(codes), 8, (0,), along_rows=False)),
        scales=_take_table(module, part, FLOAT_TYPES, (outputs, inputs), block),
        zero=0,
        levels=E4M3_LEVELS,
    )


_METHODS: dict[str, Callable[[_Settings], Quantization]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
}


def _block_of(strategy: str, block: tuple[int, int] | None, shape: tuple[int, int]) -> tuple[int, int]:
    return block or (1 if strategy == "channel" else shape[0], shape[1])


def _take_table(
    module: _Module, part: str, dtypes: tuple[str, ...], shape: tuple[int, int], block: tuple[int, int]
) -> tuple[StoredTensor, Words]:
    """Return a tensor with a number for each block, and its words as a table of blocks."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    shapes: list[Shape] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    if rows == columns == 1:
        shapes.append(())
    stored = module.take(part, dtypes, *shapes)
    return stored, _words(stored).reshape(rows, columns)


def _groups(module: _Module, part: str, inputs: int, size: int) -> tuple[StoredTensor, IntArray | None]:
    """Return the tensor with the group of each input, and these groups. None: groups are successive inputs."""
    stored = module.take(part, ("I32",), (inputs,))
    groups, usual = np.frombuffer(stored.data, "<i4"), np.arange(inputs) // size
    is_unset = part == "weight_g_idx" and (groups == -1).all()  # compressed-tensors has not ordered the inputs
    if is_unset or np.array_equal(groups, usual):
        return stored, None
    if not np.array_equal(np.sort(groups), usual):
        raise module.refuse(part, f"does not divide {inputs} inputs into groups of {size}: the file is damaged")
    return stored, groups


def _words(stored: StoredTensor) -> Words:
    words: Words = np.frombuffer(stored.data, f"<u{stored.encoding.block_bytes}").reshape(stored.shape)
    return words


def _matrix(
    method: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    codes: tuple[StoredTensor, PackedNumbers],
    scales: tuple[StoredTensor, Words],
    zeros: tuple[StoredTensor, PackedNumbers] | None = None,
    zero: int | None,
    groups: tuple[StoredTensor, IntArray | None] | None = None,
    levels: Float32Array = _INTEGERS,
    others: tuple[StoredTensor, ...] = (),
) -> CodedMatrix:
    """Return a matrix of tensors, with their words. Its encoding says whether kernels can hold its codes."""
    order = groups and groups[1]
    name = method if levels is E4M3_LEVELS else f"{method} {codes[1].bits}-bit"
    if levels is _INTEGERS and order is None and block[1] % GROUP_VALUES == shape[1] % GROUP_VALUES == 0:
        encoding = grouped(name, codes[1].bits, zero)
    elif levels is _INTEGERS:
        encoding = unpacked(f"{name} {'of odd groups' if order is None else 'act-order'}")
    else:
        encoding = unpacked(name)
    return CodedMatrix(
        codes[0].name,
        encoding,
        shape,
        parts=(codes[0], scales[0], *(pair[0] for pair in (zeros, groups) if pair), *others),
        codes=codes[1],
        levels=levels,
        scales=scales[1],
        scale_encoding=scales[0].encoding,
        zeros=zeros and zeros[1],
        zero=zero,
        block=block,
        groups=order,
    )
