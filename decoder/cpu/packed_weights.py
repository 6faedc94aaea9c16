"""Weights in the layout that the CPU step reads: panels of 32 output features side by side, in huge pages.

The precision decides the format of each matrix (`step.h` has the formats):

float32, bf16   numbers
int8            8-bit codes of rotated rows, with one scale for each row
int4            the codes of the checkpoint: codes and their scales are copied unchanged, and zeros become mins; other
                matrices become 8-bit codes. If the checkpoint has floats alone, the layers' matrices become 4-bit codes
                with a scale and a min for 32 weights, and embedding and head 8-bit codes

Every core decodes and packs a few thousand rows at a time. So loading takes little more memory than the packed weights.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.checkpoints.fingerprint import model_fingerprint
from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, layer_name
from decoder.checkpoints.quants import FLOATS, GROUP_VALUES, LEVELS, Coding, Float32Array, Parts
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
    lib.SYM_CODES: GROUP_VALUES,
}
"""Padding by format: k becomes a multiple of this number, for whole tiles of AMX or whole groups of codes."""
_KEPT_FIELDS = ("format", "n", "k", "bits", "group", "has_mins", "has_supers", "levels")
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
class _Layout:
    """Layout of codes in panels: fields of a `sym_matrix`."""

    bits: int
    group: int = GROUP_VALUES
    has_mins: bool = False
    has_supers: bool = False
    levels: str = ""

    @property
    def zero(self) -> int:
        """Return the code of 0 in a layout without mins."""
        return 1 << (self.bits - 1)

    def holds(self, coding: Coding) -> bool:
        """Return whether codes of this coding can be copied into the layout."""
        bits = 8 if coding.levels and not self.levels else coding.bits
        return bits <= self.bits and coding.group >= self.group and coding.has_supers >= self.has_supers


_EIGHT_BITS = _Layout(8)
_GROUPS = {4: (16, 32), 5: (32,), 6: (16,), 8: (32,)}
"""Groups that the kernels have, by bits. `LAYOUTS` in `kernels.h` has the same list."""
_LEVELS = {"": 0, "IQ4": 1, "MXFP4": 2}
"""Numbers of the levels in `panels.h`."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A `sym_matrix` that is to be filled from tensors."""

    layer: int
    """The layer's index. -1: embedding and head are in no layer."""
    field: str
    """Field of `sym_layer`. Up to three matrices, one after the other, are the `qkv` of a layer."""
    pieces: tuple[_Piece, ...]
    struct: Any
    mix: Float32Array | None
    """Array that `struct.mix` points to."""
    layout: _Layout | None
    """Layout of the codes, with precision int4. Codes of the file are kept unchanged."""


def check_weights(config: ModelConfig, weights: Weights, precision: str) -> None:
    """Raise the errors of `pack_weights` that can be found without reading the weights."""
    _check_room(config.name, sum(map(_num_bytes, _plan(config, weights, precision))))


def packed_bytes(config: ModelConfig, weights: Weights, precision: str) -> tuple[int, int]:
    """Return the bytes of the packed weights, and the bytes that a step of one row reads, without reading the
    weights.
    """
    matrices = _plan(config, weights, precision)
    sizes = list(map(_num_bytes, matrices))
    return sum(sizes), sum(sizes[: _num_read(weights, matrices)])


def arithmetic_revision(config: ModelConfig, weights: Weights, precision: str) -> int:
    """Return the revision of the arithmetic that computes with these weights, without reading them.

    Revision 2: products keep super-scales and groups of 16 codes, and Q, K and V may be matrices with and without mins.
    All other weights give the bits of revision 1.
    """
    matrices = [matrix for matrix in _plan(config, weights, precision) if matrix.layout is not None]
    if any(matrix.struct.has_supers or matrix.struct.group < GROUP_VALUES for matrix in matrices):
        return 2
    forms = {(matrix.layer, matrix.struct.has_mins) for matrix in matrices if matrix.field == "qkv"}
    return 2 if len(forms) > config.num_layers else 1


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
        of_layer = [matrix for matrix in matrices if matrix.layer == index]
        for number, matrix in enumerate(matrix for matrix in of_layer if matrix.field == "qkv"):
            layer.qkv[number] = matrix.struct[0]
        for matrix in of_layer:
            if matrix.field != "qkv":
                setattr(layer, matrix.field, matrix.struct[0])
        for field in ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "q_norm", "k_norm"):
            setattr(layer, field, floats(layer_name(index, field)))
        layer.qkv_bias = floats(*(layer_name(index, field) for field in ("q_bias", "k_bias", "v_bias")))
        layer.sliding = config.slides(index)
    num_read = _num_read(weights, matrices)
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
    if is_quantized and stored_bits(weights) > 6:
        raise Invalid(
            f"{config.name}: precision int4 runs the codes of a file, or makes 4-bit codes of float weights, and this "
            f"file has other codes ({weights.kinds()}): give a file of 4 to 6 bits or of floats, or say int8"
        )
    return [
        _new_matrix(weights, precision, is_quantized, *matrix) for matrix in _all_matrices(config, weights, precision)
    ]


def stored_bits(weights: Weights) -> int:
    """Return the fewest bits of codes that kernels hold, 8 if the checkpoint has other codes alone, and 0 if it has
    floats alone.
    """
    stored = [weights.stored(name) for name in weights.names()]
    codings = filter(None, map(_coding, stored))
    return min((coding.bits for coding in codings), default=0 if all(map(_is_float, stored)) else 8)


def fits_int8(weights: Weights) -> bool:
    """Return whether no matrix has rows that are too long for int8."""
    return all(len(shape) < 2 or shape[1] <= MAX_INT8_INPUTS for shape in map(weights.shape, weights.names()))


def _num_read(weights: Weights, matrices: list[_Matrix]) -> int:
    """Return how many of the plan's first matrices a step of one row reads: those of the layers, and the head."""
    return len(matrices) - (HEAD in weights)


def _num_bytes(matrix: _Matrix) -> int:
    return int(lib.sym_packed_bytes(matrix.struct))


def _all_matrices(
    config: ModelConfig, weights: Weights, precision: str
) -> Iterator[tuple[int, str, tuple[_Piece, ...]]]:
    """Yield layer, field and pieces of each matrix: those of the layers, the head, and the embedding if it is another
    matrix.
    """
    for index in range(config.num_layers):
        for pieces in _qkv_pieces(weights, precision, index):
            yield index, "qkv", pieces
        yield index, "o", (_Piece(layer_name(index, "o")),)
        # Strips of gate and up alternate. So a panel has 16 features of each, and the kernel multiplies the two at its
        # end.
        yield index, "gate_up", (_Piece(layer_name(index, "gate"), 0, 2), _Piece(layer_name(index, "up"), 1, 2))
        yield index, "down", (_Piece(layer_name(index, "down")),)
    if HEAD in weights:
        yield -1, "head", (_Piece(HEAD),)
    yield -1, "embed", (_Piece(EMBED),)


def _qkv_pieces(weights: Weights, precision: str, index: int) -> Iterator[tuple[_Piece, ...]]:
    """Yield the pieces of one matrix for Q, K and V. If the file has their codes in several layouts, yield those of a
    matrix for each.
    """
    names = [layer_name(index, field) for field in "qkv"]
    for _, run in groupby(names, lambda name: _joined(weights, [name]) if precision == "int4" else None):
        pieces: list[_Piece] = []
        for name in run:
            pieces.append(_Piece(name, sum(weights.shape(each.name)[0] // _STRIP for each in pieces)))
        yield tuple(pieces)


def _coding(stored: Tensor) -> Coding | None:
    """Return the coding of a matrix."""
    return stored.encoding.coding if len(stored.shape) == 2 else None


def _is_float(stored: Tensor) -> bool:
    return stored.encoding.name in FLOATS


def _joined(weights: Weights, names: list[str]) -> _Layout:
    """Return the smallest layout that holds the codes of all these tensors. Otherwise, they become 8-bit codes."""
    codings = [_coding(weights.stored(name)) for name in names]
    found = [coding for coding in codings if coding is not None]
    has_mins = any(coding.has_mins for coding in found)
    if len(found) < len(codings):
        return _Layout(8, has_mins=has_mins)
    has_supers = all(coding.has_supers for coding in found)
    if found[0].levels and len({coding.levels for coding in found}) == 1:
        return _Layout(4, has_supers=has_supers, levels=found[0].levels)
    bits, group = max(8 if each.levels else each.bits for each in found), min(coding.group for coding in found)
    for bits_, groups in _GROUPS.items():
        if bits_ >= bits and (fitting := [each for each in groups if each <= group]):
            return _Layout(bits_, max(fitting), has_mins, has_supers and bits_ < 8)
    return _Layout(8, has_mins=has_mins)


def _new_matrix(
    weights: Weights, precision: str, is_quantized: bool, layer: int, field: str, pieces: tuple[_Piece, ...]
) -> _Matrix:
    names = [piece.name for piece in pieces]
    num_inputs, layout = weights.shape(names[0])[1], None
    if is_quantized:
        layout = _joined(weights, names)
    elif precision == "int4":
        layout = _EIGHT_BITS if layer < 0 else _Layout(4, has_mins=True)
    format_ = lib.SYM_CODES if layout else _FROM_FLOATS[precision]
    struct = ffi.new("sym_matrix *")
    struct.format = format_
    struct.n = sum(weights.shape(name)[0] for name in names)
    struct.k = -(-num_inputs // _PADDING[format_]) * _PADDING[format_]
    if layout:
        struct.bits, struct.group = layout.bits, layout.group
        struct.has_mins, struct.has_supers = layout.has_mins, layout.has_supers
        struct.levels = _LEVELS[layout.levels]
    mix = None
    if format_ == lib.SYM_ROTATED8:
        if num_inputs > MAX_INT8_INPUTS:
            raise Invalid(f"{names[0]} has rows of {num_inputs}, int8 takes {MAX_INT8_INPUTS}: say bf16")
        mix = _hartley(num_inputs // (num_inputs & -num_inputs))
        struct.mix = ffi.NULL if mix is None else _floats(mix)
    return _Matrix(layer, field, pieces, struct, mix, layout)


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
    coding, layout = _coding(stored), matrix.layout
    if stored.encoding.name == "Q4_0" and layout == _Layout(4):
        blocks = np.frombuffer(stored.data, np.uint8)
        largest = lib.sym_pack_q4_0(struct, ffi.cast("uint8_t *", blocks.ctypes.data), *place)
        _check_scales(stored, np.array([largest], np.float32), None)
        return
    if coding is not None and layout is not None and layout.holds(coding):
        with np.errstate(all="ignore"):  # scales of a damaged file may have any bits: the next line refuses them
            parts = _fitted(coding, stored.encoding.parts(stored.data, stored.shape[0]), layout)
        _check_scales(stored, parts.scales, parts.mins)
        codes = ffi.new(
            "sym_codes *",
            {
                "codes": _pointer("uint8_t *", parts.codes),
                "scales": _pointer("float *", parts.scales),
                "mins": _pointer("float *", parts.mins),
                "scale_codes": _pointer("int8_t *", parts.scale_factors),
                "min_codes": _pointer("int8_t *", parts.min_factors),
            },
        )
        lib.sym_pack_codes(struct, codes, *place)
        return
    values = np.empty(stored.shape, np.float32)
    stored.read_into(values)
    if layout:
        _check_scales(stored, values, None)
    if struct.format == lib.SYM_ROTATED8 and not np.abs(values).max() < _MAX_ROTATED:
        raise Invalid(f"{stored.file}: tensor {stored.name} is too large for codes: the file is damaged, or needs bf16")
    lib.sym_pack(struct, _floats(values), *place)


def _fitted(coding: Coding, parts: Parts, layout: _Layout) -> Parts:
    """Return the stored codes in this layout: with the layout's zero and groups, with mins or without."""
    if not layout.has_supers:
        parts = parts.without_supers()
    codes, scales, mins, zero = parts.codes, parts.scales, parts.mins, coding.zero
    scale_factors, min_factors = parts.scale_factors, parts.min_factors
    if coding.levels and not layout.levels:
        codes, zero = (LEVELS[coding.levels].view(np.uint8) ^ np.uint8(128))[codes], 128
    if layout.has_mins and mins is None:
        mins, min_factors = scales * np.float32(-zero), scale_factors
    elif not layout.has_mins and not layout.levels and zero != layout.zero:
        codes = codes + np.uint8(layout.zero - zero)
    tables: list[npt.NDArray[Any] | None] = [scales, mins, scale_factors, min_factors]
    if coding.group > layout.group:  # successive groups have the same scale; supers stay as they are
        repeats = coding.group // layout.group
        first = 2 if layout.has_supers else 0
        tables[first:] = [None if each is None else np.repeat(each, repeats, axis=1) for each in tables[first:]]
    return Parts(*(None if each is None else np.ascontiguousarray(each) for each in (codes, *tables)))  # type: ignore[arg-type]


def _check_scales(stored: StoredTensor, scales: Float32Array, mins: Float32Array | None) -> None:
    """Raise Invalid for scales that do not fit float16 in units of 2^-8. The scales of all real models fit."""
    for values in (scales, scales if mins is None else mins):
        if not np.abs(values).max() < _MAX_SCALE:
            raise Invalid(
                f"{stored.file}: tensor {stored.name} is not finite or too large for codes: the file is "
                "damaged, or needs --precision bf16"
            )


def _floats(array: Float32Array) -> Any:
    return _pointer("float *", array)


def _pointer(kind: str, array: npt.NDArray[Any] | None) -> Any:
    return ffi.NULL if array is None else ffi.cast(kind, array.ctypes.data)


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
        matrices=[[getattr(matrix.struct, field) for field in _KEPT_FIELDS] for matrix in matrices],
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
