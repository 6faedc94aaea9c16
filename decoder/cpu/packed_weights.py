"""Weights in the layout that the CPU step reads: panels of 32 output features side by side, in huge pages.

The precision decides the format of each matrix (`step.h` has the formats):

float32, bf16   numbers
int8            8-bit codes of rotated rows, with one scale for each row
int4            the codes of the checkpoint: 4-bit codes and their scales are copied unchanged, and zeros become mins;
                other matrices become 8-bit codes. If the checkpoint has floats alone, the layers' matrices become
                4-bit codes with a scale and a min for 32 weights, and embedding and head 8-bit codes

Every core decodes and packs a few thousand rows at a time. So loading takes little more memory than the packed weights.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from decoder.checkpoints.fingerprint import model_fingerprint
from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, layer_name
from decoder.checkpoints.quants import FLOATS, GROUP_VALUES, Float32Array, Parts
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Tensor, Weights
from decoder.cores import available_cores
from decoder.cpu._step import ffi, lib
from decoder.cpu.panel_cache import REVISION, About, checkpoint_files, open_cache
from decoder.cpu.panel_memory import PanelMemory
from decoder.memory import available_memory_bytes
from decoder.model_config import ModelConfig
from libsym.errors import Invalid, SymError

log = logging.getLogger(__name__)

_STRIP = 16
"""Number of features in a strip. A strip is half a panel."""
_JOB_VALUES = 1 << 21
"""Number of weights that one job decodes: 8 MiB as float32."""
_JOBS_AHEAD = 16
"""Jobs whose bytes the disk reads ahead: 18 MiB of 4-bit codes."""
_PADDING = {
    lib.SYM_FLOAT32: 1,
    lib.SYM_BFLOAT16: 32,
    lib.SYM_ROTATED8: 64,
    lib.SYM_CODES8: GROUP_VALUES,
    lib.SYM_CODES4: GROUP_VALUES,
}
"""Padding by format: k becomes a multiple of this number, for whole tiles of AMX or whole groups of codes."""
_ZERO = {lib.SYM_CODES8: 128, lib.SYM_CODES4: 8}
_MAX_SCALE = 250.0
_MAX_ROTATED = 1e30
MAX_INT8_INPUTS: int = lib.SYM_MAX_INPUTS
"""Longest row of a matrix in int8, so that a sum of as many codes fits 32 bits."""
_FROM_FLOATS = {"float32": lib.SYM_FLOAT32, "bf16": lib.SYM_BFLOAT16, "int8": lib.SYM_ROTATED8}


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The C structs of the weights, and every array that they point into."""

    layers: Any
    """`sym_layer[num_layers]`"""
    embed: Any
    head: Any
    """A `sym_matrix`, like `embed`. If head and embedding are tied, both are the same matrix."""
    final_norm: Any
    owned: tuple[Any, ...]
    num_bytes: int
    """Bytes that a step of one row reads: all matrices, without the embedding if the head is another matrix."""
    keep: Callable[[], None]
    """Function that keeps the packed matrices for the next start. It runs for seconds, while steps read the weights."""
    make_room: Callable[[], object] | None
    """Function that removes files of the cache while the disk is nearly full. None: there is no cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor whose rows become the strips `first`, `first + every`, … of a matrix."""

    name: str
    first: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A `sym_matrix` that is to be filled from tensors."""

    pieces: tuple[_Piece, ...]
    struct: Any
    mix: Float32Array | None
    """Array that `struct.mix` points to."""
    as_stored: bool
    """Whether codes of the file are kept unchanged."""


def check_weights(config: ModelConfig, weights: Weights, precision: str) -> None:
    """Raise the errors of `pack_weights` that can be found without reading the weights."""
    _check_room(config.name, sum(map(_num_bytes, _plan(config, weights, precision))))


def packed_bytes(config: ModelConfig, weights: Weights, precision: str) -> tuple[int, int]:
    """Return the bytes of the packed weights, and the bytes that a step of one row reads, without reading the
    weights.
    """
    sizes = list(map(_num_bytes, _plan(config, weights, precision)))
    return sum(sizes), sum(sizes[: _num_read(config)])


def pack_weights(
    config: ModelConfig,
    weights: Weights,
    precision: str,
    checkpoint: Callable[[float], None] = lambda _share: None,
    *,
    cache_directory: Path | None = None,
    isa: str = "",
) -> PackedWeights:
    """Return a packed copy, which does not refer to `weights`. If the cache has the copy, nothing is packed.

    `checkpoint` is called often, with the share of the work that is done. An exception from it ends the packing. `isa`:
    the instruction set that will read the panels.
    """
    matrices = _plan(config, weights, precision)
    memory = _allocate(config.name, matrices)
    keep: Callable[[], None] = lambda: None  # noqa: E731 - a field of the result
    cache = None
    about = None if cache_directory is None else _about(config, weights, precision, isa, matrices)
    if cache_directory is None or about is None or (cache := open_cache(cache_directory)) is None:
        _run(list(_jobs(weights, matrices)), checkpoint)
    elif not cache.load(about, memory, checkpoint):
        _run(list(_jobs(weights, matrices)), checkpoint)
        keep = partial(cache.keep, about, memory)
    owned: list[Any] = [memory, matrices]

    def floats(*names: str) -> Any:
        """Return the vectors with these names in one array, or null if the model has none of them."""
        if names[0] not in weights:
            return ffi.NULL
        owned.append(np.concatenate([weights.read(name) for name in names]))
        return ffi.cast("float *", owned[-1].ctypes.data)

    layers = ffi.new("sym_layer[]", config.num_layers)
    for index in range(config.num_layers):
        layer = layers[index]
        layer.qkv, layer.o, layer.gate_up, layer.down = (m.struct[0] for m in matrices[4 * index : 4 * index + 4])
        for field in ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "q_norm", "k_norm"):
            setattr(layer, field, floats(layer_name(index, field)))
        layer.qkv_bias = floats(*(layer_name(index, field) for field in ("q_bias", "k_bias", "v_bias")))
        layer.sliding = config.slides(index)
    num_read = _num_read(config)
    head, embed = matrices[num_read - 1], matrices[-1]
    return PackedWeights(
        layers=layers,
        embed=embed.struct,
        head=head.struct,
        final_norm=floats(FINAL_NORM),
        owned=tuple(owned),
        num_bytes=sum(map(_num_bytes, matrices[:num_read])),
        keep=keep,
        make_room=None if cache is None else cache.make_room,
    )


def _plan(config: ModelConfig, weights: Weights, precision: str) -> list[_Matrix]:
    """Return every matrix that a step reads, not yet filled, with its format for this precision."""
    is_quantized = precision == "int4" and stored_bits(weights) > 0
    if is_quantized and stored_bits(weights) > 4:
        raise Invalid(
            f"{config.name}: precision int4 runs the 4-bit codes of a file, or makes them of float weights, and this "
            f"file has other codes ({weights.kinds()}): give a file of 4-bit codes or of floats, or say int8"
        )
    return [_new_matrix(weights, precision, pieces, is_quantized) for pieces in _all_pieces(config, weights)]


def stored_bits(weights: Weights) -> int:
    """Return 4 if the checkpoint has matrices of 4-bit codes that kernels hold, 8 if it has other codes, and 0 if it
    has floats alone.
    """
    stored = [weights.stored(name) for name in weights.names()]
    if any(_bits(each) == 4 for each in stored):
        return 4
    return 0 if all(each.encoding.name in FLOATS for each in stored) else 8


def fits_int8(weights: Weights) -> bool:
    """Return whether no matrix has rows that are too long for int8."""
    return all(len(shape) < 2 or shape[1] <= MAX_INT8_INPUTS for shape in map(weights.shape, weights.names()))


def _num_read(config: ModelConfig) -> int:
    """Return how many of the plan's first matrices a step of one row reads: those of the layers, and the head."""
    return 4 * config.num_layers + 1


def _num_bytes(matrix: _Matrix) -> int:
    return int(lib.sym_packed_bytes(matrix.struct))


def _all_pieces(config: ModelConfig, weights: Weights) -> Iterator[tuple[_Piece, ...]]:
    """Yield the pieces of each matrix: four matrices a layer, the head, and the embedding if it is another matrix."""
    heads, kv = config.num_heads * config.head_dim // _STRIP, config.num_kv_heads * config.head_dim // _STRIP
    for index in range(config.num_layers):
        yield (
            _Piece(layer_name(index, "q")),
            _Piece(layer_name(index, "k"), heads),
            _Piece(layer_name(index, "v"), heads + kv),
        )
        yield (_Piece(layer_name(index, "o")),)
        # Strips of gate and up alternate. So a panel has 16 features of each, and the kernel multiplies the two at its
        # end.
        yield (_Piece(layer_name(index, "gate"), 0, 2), _Piece(layer_name(index, "up"), 1, 2))
        yield (_Piece(layer_name(index, "down")),)
    if HEAD in weights:
        yield (_Piece(HEAD),)
    yield (_Piece(EMBED),)


def _bits(stored: Tensor) -> int:
    """Return the bits of a code of this matrix, or 0 if the tensor has no codes with one scale for each 32 codes."""
    coding = stored.encoding.coding
    return coding.bits if coding is not None and len(stored.shape) == 2 else 0


def _new_matrix(weights: Weights, precision: str, pieces: tuple[_Piece, ...], is_quantized: bool) -> _Matrix:
    tensors = [weights.stored(piece.name) for piece in pieces]
    format_, has_mins = _FROM_FLOATS.get(precision, lib.SYM_CODES8), False
    if precision == "int4" and not is_quantized:
        if pieces[0].name not in (EMBED, HEAD):
            format_, has_mins = lib.SYM_CODES4, True
    elif precision == "int4":
        if all(_bits(tensor) == 4 for tensor in tensors):
            format_ = lib.SYM_CODES4
        codings = [tensor.encoding.coding for tensor in tensors]
        has_mins = any(coding is not None and coding.zero == 0 for coding in codings)
    num_inputs = tensors[0].shape[1]
    struct = ffi.new("sym_matrix *")
    struct.format, struct.has_mins = format_, has_mins
    struct.n = sum(tensor.shape[0] for tensor in tensors)
    struct.k = -(-num_inputs // _PADDING[format_]) * _PADDING[format_]
    mix = None
    if format_ == lib.SYM_ROTATED8:
        if num_inputs > MAX_INT8_INPUTS:
            raise Invalid(f"{tensors[0].name} has rows of {num_inputs}, int8 takes {MAX_INT8_INPUTS}: say bf16")
        mix = _hartley(num_inputs // (num_inputs & -num_inputs))
        struct.mix = ffi.NULL if mix is None else _floats(mix)
    return _Matrix(pieces, struct, mix, as_stored=precision == "int4")


def _hartley(size: int) -> Float32Array | None:
    """Return the orthonormal, symmetric Hartley transform, for sizes that Hadamard's transform cannot mix.

    Return None if `size` is 1, or larger than SYM_MAX_MIX.
    """
    if not 1 < size <= lib.SYM_MAX_MIX:
        return None
    angles = 2 * np.pi / size * np.outer(np.arange(size), np.arange(size))
    return np.ascontiguousarray((np.cos(angles) + np.sin(angles)) / np.sqrt(size), dtype=np.float32)


_Job: TypeAlias = tuple[Weights, _Matrix, _Piece, int, int]
"""Arguments of `_pack`."""


def _jobs(weights: Weights, matrices: list[_Matrix]) -> Iterator[_Job]:
    """Yield the jobs. The embedding comes first: otherwise its jobs would end last."""
    for matrix in reversed(matrices):
        for piece in matrix.pieces:
            rows, inputs = weights.shape(piece.name)
            step = max(1, _JOB_VALUES // inputs // _STRIP) * _STRIP
            for first in range(0, rows, step):
                yield weights, matrix, piece, first, min(first + step, rows)


def _pack(weights: Weights, matrix: _Matrix, piece: _Piece, first: int, end: int) -> None:
    """Pack rows [first, end) of a tensor into their strips."""
    stored, struct = weights.rows(piece.name, first, end), matrix.struct
    place = (*stored.shape, piece.first + first // _STRIP * piece.every, piece.every)
    if stored.encoding.name == "Q4_0" and struct.format == lib.SYM_CODES4 and not struct.has_mins:
        blocks = np.frombuffer(stored.data, np.uint8)
        largest = lib.sym_pack_q4_0(struct, ffi.cast("uint8_t *", blocks.ctypes.data), *place)
        _check_scales(stored, np.array([largest], np.float32), None)
        return
    if matrix.as_stored and _bits(stored):
        codes, scales, mins = _fitted(stored, struct)
        _check_scales(stored, scales, mins)
        pointers = (
            ffi.cast("uint8_t *", codes.ctypes.data),
            _floats(scales),
            ffi.NULL if mins is None else _floats(mins),
        )
        lib.sym_pack_codes(struct, *pointers, *place)
        return
    values = np.empty(stored.shape, np.float32)
    stored.read_into(values)
    if matrix.as_stored:
        _check_scales(stored, values, None)
    if struct.format == lib.SYM_ROTATED8 and not np.abs(values).max() < _MAX_ROTATED:
        raise Invalid(f"{stored.file}: tensor {stored.name} is too large for codes: the file is damaged, or needs bf16")
    lib.sym_pack(struct, _floats(values), *place)


def _fitted(stored: StoredTensor, struct: Any) -> Parts:
    """Return the stored codes in the form of this matrix: with the format's zero, or with mins."""
    coding = stored.encoding.coding
    assert coding is not None
    codes, scales, mins = stored.encoding.parts(stored.data, stored.shape[0])
    if mins is None and struct.has_mins:
        mins = scales * np.float32(-coding.zero)
    elif mins is None and coding.zero != _ZERO[struct.format]:
        codes = codes + np.uint8(_ZERO[struct.format] - coding.zero)
    return (
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scales),
        None if mins is None else np.ascontiguousarray(mins),
    )


def _check_scales(stored: StoredTensor, scales: Float32Array, mins: Float32Array | None) -> None:
    """Raise Invalid for scales that do not fit float16 in units of 2^-8. The scales of all real models fit."""
    for values in (scales, scales if mins is None else mins):
        if not np.abs(values).max() < _MAX_SCALE:
            raise Invalid(
                f"{stored.file}: tensor {stored.name} is not finite or too large for codes: the file is "
                "damaged, or needs --precision bf16"
            )


def _floats(array: Float32Array) -> Any:
    return ffi.cast("float *", array.ctypes.data)


def _run(jobs: list[_Job], checkpoint: Callable[[float], None]) -> None:
    """Pack on all cores, and have the disk read the next jobs' rows meanwhile."""
    with ThreadPoolExecutor(available_cores(), thread_name_prefix="load") as pool:
        futures = [pool.submit(_pack, *job) for job in jobs]
        try:
            for number, future in enumerate(futures):
                checkpoint(number / len(futures))
                for weights, _, piece, first, end in jobs[number + _JOBS_AHEAD : number + _JOBS_AHEAD + 1]:
                    weights.stored(piece.name).read_ahead(first, end)
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _about(config: ModelConfig, weights: Weights, precision: str, isa: str, matrices: list[_Matrix]) -> About | None:
    """Return the description of these panels in a cache. None: the weights are not of a checkpoint's files."""
    parts = [part for name in weights.names() for part in weights.stored(name).parts]
    files = {part.file.absolute() for part in parts if part.is_of_file}
    if not files:
        return None
    try:
        checkpoint = checkpoint_files(sorted(files))
    except OSError as error:
        log.warning("packed weights of %s are not kept: %s", config.name, error)
        return None
    return About(
        revision=REVISION,
        processor=isa,
        precision=precision,
        model=config.name,
        fingerprint=model_fingerprint(config, weights),
        checkpoint=checkpoint,
        matrices=[[m.struct.format, m.struct.n, m.struct.k, m.struct.has_mins] for m in matrices],
    )


def _allocate(name: str, matrices: list[_Matrix]) -> PanelMemory:
    """Return zeroed memory for these matrices, which they point into. Each matrix begins on a cache line."""
    sizes = [_num_bytes(matrix) for matrix in matrices]
    starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
    _check_room(name, int(starts[-1]))
    memory = PanelMemory(name, int(starts[-1]))
    for matrix, start in zip(matrices, starts, strict=False):
        matrix.struct.data = ffi.cast("char *", memory.array.ctypes.data + int(start))
    return memory


def _check_room(name: str, needed: int) -> None:
    available = available_memory_bytes()
    if needed > available:
        raise SymError(
            f"{name}: the weights take {needed / 1e9:.1f} GB in this precision, {available / 1e9:.1f} GB of memory are "
            "available: choose a smaller model or precision, or free or add memory",
            errno.ENOMEM,
        )
