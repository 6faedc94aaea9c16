"""Decoders of the number types in checkpoints. The decoded numbers are float32.

A stored tensor is a sequence of blocks of fixed size. Plain types have one value in each block. The quantised types of
GGUF have 32 values with one float16 scale (and, for the `_1` types, one float16 offset). The K types have 256 values:
a float16 scale, the super-scale, has small whole numbers as factors, which give a scale to each 16 or 32 values. Blocks
of `grouped` are made from quantised checkpoints of Hugging Face. Every decoder below does the same float32 operations
in the same order as the format's definition, so results are equal to the `gguf` package's bit for bit.

`dequantize` decodes a few thousand blocks at a time, so that the temporaries stay in the cache. In this way, the
default model loads three times as fast as with whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ByteArray: TypeAlias = npt.NDArray[np.uint8]
Float32Array: TypeAlias = npt.NDArray[np.float32]

GROUP_VALUES = 32
GROUP = np.dtype([("codes", np.uint8, GROUP_VALUES), ("scale", np.float32), ("zero", np.float32)])
"""Block of `grouped`."""
LEVELS = {
    "IQ4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8),
    "MXFP4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8),
}
"""Levels of 4-bit codes. MXFP4's are twice its numbers."""
_CHUNK_VALUES = 1 << 18  # 1 MiB of float32: a chunk and its temporaries fit a core's L2


Int8Array: TypeAlias = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Parts:
    """Codes of n blocks, or of n rows of a matrix, with their scales and mins.

    Without factors, a group of numbers has one of `scales` and one of `mins`. With factors, these are supers, one for
    256 numbers, and a group's scale is its super-scale times its factor.
    """

    codes: ByteArray
    """`[n, numbers]`"""
    scales: Float32Array
    """`[n, groups or supers]`"""
    mins: Float32Array | None = None
    scale_factors: Int8Array | None = None
    """`[n, groups]`"""
    min_factors: Int8Array | None = None

    def by_row(self, num_rows: int) -> Parts:
        """Return the parts of a matrix that has these blocks."""
        tables = (self.codes, self.scales, self.mins, self.scale_factors, self.min_factors)
        return Parts(*(None if table is None else table.reshape(num_rows, -1) for table in tables))  # type: ignore[arg-type]

    def without_supers(self) -> Parts:
        """Return the same parts, with the scales and mins of groups in place of supers and factors."""
        if self.scale_factors is None:
            return self
        mins = None
        if self.mins is not None and self.min_factors is not None:
            mins = _times(self.mins, self.min_factors)
        return Parts(self.codes, _times(self.scales, self.scale_factors), mins)


def _times(supers: Float32Array, factors: Int8Array) -> Float32Array:
    """Return the scales of groups. Each super belongs to as many successive groups."""
    groups = factors.reshape(*supers.shape, -1) * supers[:, :, None]
    return groups.reshape(factors.shape)


@dataclass(frozen=True, slots=True)
class Coding:
    """Coding of a quantised type: each number has a code, and a group of numbers shares a scale."""

    bits: int
    zero: int
    """The code of 0 in types without mins: a number is scale * (code - zero). With mins, it is scale * code + min."""
    split: Callable[[ByteArray], Parts]
    """Splits blocks `[n, block_bytes]` into their parts."""
    group: int = GROUP_VALUES
    """Number of values in a group: 16 or 32."""
    has_supers: bool = False
    levels: str = ""
    """Name of the levels that codes number: a number is scale * level. Empty: codes are levels."""

    @property
    def has_mins(self) -> bool:
        return self.zero == 0 and not self.levels

    def decode(self, blocks: ByteArray, out: Float32Array) -> None:
        """Decode blocks into `out`, with the operations of the format's definition in their order."""
        parts = self.split(blocks).without_supers()
        np.copyto(out, LEVELS[self.levels][parts.codes] if self.levels else parts.codes)
        groups = out.reshape(len(out), -1, self.group)
        if parts.mins is None and not self.levels:
            groups -= self.zero
        groups *= parts.scales[:, :, None]
        if parts.mins is not None:
            groups += parts.mins[:, :, None]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Layout of one type of stored number, and its decoder."""

    name: str
    block_values: int
    block_bytes: int
    decode: Callable[[ByteArray, Float32Array], None]
    """Decode blocks `[n, block_bytes]` into values `[n, block_values]`."""
    coding: Coding | None = None
    """Coding of the type. None: the type has no codes of which groups share a scale."""

    def stored_bytes(self, num_values: int) -> int:
        """Return the number of bytes that `num_values` values take. The values must fill whole blocks."""
        assert num_values % self.block_values == 0, (self.name, num_values)
        return num_values // self.block_values * self.block_bytes

    def parts(self, stored: memoryview, num_rows: int) -> Parts:
        """Return the codes, scales and mins of a matrix, by row."""
        assert self.coding is not None, self.name
        blocks = np.frombuffer(stored, dtype=np.uint8).reshape(-1, self.block_bytes)
        return self.coding.split(blocks).by_row(num_rows)


def dequantize(encoding: Encoding, stored: memoryview, out: Float32Array) -> bool:
    """Decode `stored` into `out` (C-contiguous, of the right size). Return False if a value is not finite."""
    assert out.flags.c_contiguous, out.strides
    blocks = np.frombuffer(stored, dtype=np.uint8).reshape(-1, encoding.block_bytes)
    values = out.reshape(-1, encoding.block_values)
    step = max(1, _CHUNK_VALUES // encoding.block_values)
    finite = True
    # Scales of a damaged file may have any bits. The check for finite values below finds unusable results.
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            chunk = values[first : first + step]
            encoding.decode(blocks[first : first + step], chunk)
            finite = finite and bool(np.isfinite(chunk).all())
    return finite


def _half(blocks: ByteArray, first: int) -> Float32Array:
    """Return the float16 at byte `first` of every block, as a float32 column `[n, 1]`."""
    return blocks[:, first : first + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: ByteArray, group: int) -> ByteArray:
    """Split each group of `group` bytes into its low nibbles, then its high nibbles: `[n, 2 * bytes]`."""
    grouped = packed.reshape(len(packed), -1, group)
    out = np.empty((len(packed), grouped.shape[1], 2, group), dtype=np.uint8)
    np.bitwise_and(grouped, 0x0F, out=out[:, :, 0])
    np.right_shift(grouped, 4, out=out[:, :, 1])
    return out.reshape(len(packed), -1)


def _bits(packed: ByteArray, group: int, width: int) -> ByteArray:
    """Split each group of `group` bytes into 8 / width runs of `width`-bit fields, the lowest bits first.

    The result is `[n, 8 / width * bytes]`.
    """
    grouped = packed.reshape(len(packed), -1, group)
    runs = 8 // width
    out = np.empty((len(packed), grouped.shape[1], runs, group), dtype=np.uint8)
    for run in range(runs):
        np.right_shift(grouped, width * run, out=out[:, :, run])
    out &= (1 << width) - 1
    return out.reshape(len(packed), -1)


def _fifth_bits(blocks: ByteArray, first: int) -> ByteArray:
    """Return the fifth bit of the 32 codes of every Q5 block, as 0 or 16; the bits begin at byte `first`."""
    bits = np.unpackbits(blocks[:, first : first + 4], axis=-1, bitorder="little")
    bits <<= 4
    return bits


def _f32(blocks: ByteArray, out: Float32Array) -> None:
    np.copyto(out, blocks.view(np.float32))


def _f16(blocks: ByteArray, out: Float32Array) -> None:
    np.copyto(out, blocks.view(np.float16))


def _bf16(blocks: ByteArray, out: Float32Array) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _integers(kind: type[np.signedinteger[Any]]) -> Callable[[ByteArray, Float32Array], None]:
    return lambda blocks, out: np.copyto(out, blocks.view(kind), casting="unsafe")


def _e4m3_levels() -> Float32Array:
    """Return the value of each byte as float8 e4m3, which has NaN but no infinity."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, (codes & 7) / 8
    levels = np.where(exponents == 0, np.ldexp(fractions, -6), np.ldexp(1 + fractions, exponents - 7))
    levels[127] = np.nan
    return np.concatenate([levels, -levels]).astype(np.float32)


E4M3_LEVELS = _e4m3_levels()


def _e4m3(blocks: ByteArray, out: Float32Array) -> None:
    np.copyto(out, E4M3_LEVELS[blocks])


def _q4_0(blocks: ByteArray) -> Parts:
    return Parts(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: ByteArray) -> Parts:
    return Parts(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: ByteArray) -> Parts:
    return Parts(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: ByteArray) -> Parts:
    return Parts(_nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: ByteArray) -> Parts:
    return Parts(blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0))  # the format has int8 codes: 0 becomes 128


def _scales_and_mins(packed: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Unpack eight 6-bit scales and eight 6-bit mins from the 12 bytes of a Q4_K or Q5_K block.

    The low 6 bits of bytes 0-3 are the first four scales. The low 6 bits of bytes 4-7 are the first four mins. The high
    2 bits of these eight bytes are the high bits of the last four scales and mins, whose low 4 bits are the nibbles of
    bytes 8-11.
    """
    head_scales, head_mins, tails = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([head_scales & 0x3F, (tails & 0x0F) | ((head_scales >> 2) & 0x30)], axis=1)
    mins = np.concatenate([head_mins & 0x3F, (tails >> 4) | ((head_mins >> 2) & 0x30)], axis=1)
    return scales, mins


def _k_parts(blocks: ByteArray, codes: ByteArray) -> Parts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    return Parts(codes, _half(blocks, 0), -_half(blocks, 2), scales.view(np.int8), mins.view(np.int8))


def _q4_k(blocks: ByteArray) -> Parts:
    return _k_parts(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: ByteArray) -> Parts:
    high = _bits(blocks[:, 16:48], 32, 1)
    high <<= 4
    return _k_parts(blocks, _nibbles(blocks[:, 48:], 32) | high)


def _q6_k(blocks: ByteArray) -> Parts:
    high = _bits(blocks[:, 128:192], 32, 2)
    high <<= 4
    factors = blocks[:, 192:208].view(np.int8)
    return Parts(_nibbles(blocks[:, :128], 64) | high, _half(blocks, 208), None, factors)


def _q2_k(blocks: ByteArray) -> Parts:
    scales = blocks[:, :16]
    factors = (scales & 0x0F).view(np.int8), (scales >> 4).view(np.int8)
    return Parts(_bits(blocks[:, 16:80], 32, 2), _half(blocks, 80), -_half(blocks, 82), *factors)


def _q3_k(blocks: ByteArray) -> Parts:
    high = _bits(blocks[:, :32], 32, 1)
    high <<= 2
    # The low 4 bits of the 16 factors are nibbles of 8 bytes, the low nibbles first. The high 2 bits are in 4 bytes.
    factors = _nibbles(blocks[:, 96:104], 8) | _bits(blocks[:, 104:108], 4, 2) << 4
    return Parts(_bits(blocks[:, 32:96], 32, 2) | high, _half(blocks, 108), None, (factors - 32).view(np.int8))


def _iq4_nl(blocks: ByteArray) -> Parts:
    return Parts(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _iq4_xs(blocks: ByteArray) -> Parts:
    low, high = blocks[:, 4:8], blocks[:, 2:4]
    factors = np.stack([low & 0x0F, low >> 4], axis=2).reshape(-1, 8)
    for index in range(8):
        factors[:, index] |= (high[:, index // 4] >> index % 4 * 2 & 3) << 4
    return Parts(_nibbles(blocks[:, 8:], 16), _half(blocks, 0), None, (factors - 32).view(np.int8))


def _mxfp4(blocks: ByteArray) -> Parts:
    exponents = blocks[:, :1].astype(np.int32)
    return Parts(_nibbles(blocks[:, 1:], 16), np.ldexp(np.float32(1), exponents - 128))  # half of 2^(exponent - 127)


def grouped(name: str, bits: int, zero: int | None) -> Encoding:
    """Return an encoding of blocks of `GROUP`: a number is (code - zero) * scale. `zero`: the zero of all blocks, or
    None.
    """

    def split(blocks: ByteArray) -> Parts:
        groups = blocks.view(GROUP)
        mins = None if zero is not None else -(groups["scale"] * groups["zero"])
        return Parts(groups["codes"][:, 0], groups["scale"], mins)

    def decode(blocks: ByteArray, out: Float32Array) -> None:
        groups = blocks.view(GROUP)
        np.copyto(out, groups["codes"][:, 0])
        out -= groups["zero"]
        out *= groups["scale"]

    return Encoding(name, GROUP_VALUES, GROUP.itemsize, decode, Coding(bits, zero or 0, split))


def unpacked(name: str) -> Encoding:
    """Return an encoding of float32 whose name says which codes were decoded."""
    return Encoding(name, 1, 4, _f32)


def _coded(name: str, block_values: int, block_bytes: int, coding: Coding) -> Encoding:
    return Encoding(name, block_values, block_bytes, coding.decode, coding)


FP8 = "FP8"
"""Name of the encoding of float8 matrices that have scales."""
FLOATS = ("F32", "F16", "BF16", FP8)
"""Names of encodings of floats."""
ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("F32", 1, 4, _f32),
        Encoding("F16", 1, 2, _f16),
        Encoding("BF16", 1, 2, _bf16),
        _coded("Q4_0", 32, 18, Coding(4, 8, _q4_0)),
        _coded("Q4_1", 32, 20, Coding(4, 0, _q4_1)),
        _coded("Q5_0", 32, 22, Coding(5, 16, _q5_0)),
        _coded("Q5_1", 32, 24, Coding(5, 0, _q5_1)),
        _coded("Q8_0", 32, 34, Coding(8, 128, _q8_0)),
        _coded("Q4_K", 256, 144, Coding(4, 0, _q4_k, has_supers=True)),
        _coded("Q5_K", 256, 176, Coding(5, 0, _q5_k, has_supers=True)),
        _coded("Q6_K", 256, 210, Coding(6, 32, _q6_k, group=16, has_supers=True)),
        _coded("Q2_K", 256, 84, Coding(2, 0, _q2_k, group=16, has_supers=True)),
        _coded("Q3_K", 256, 110, Coding(3, 4, _q3_k, group=16, has_supers=True)),
        _coded("IQ4_NL", 32, 18, Coding(4, 0, _iq4_nl, levels="IQ4")),
        _coded("IQ4_XS", 256, 136, Coding(4, 0, _iq4_xs, has_supers=True, levels="IQ4")),
        _coded("MXFP4", 32, 17, Coding(4, 0, _mxfp4, levels="MXFP4")),
    )
}
CODE_ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("F8_E4M3", 1, 1, _e4m3),
        Encoding("I8", 1, 1, _integers(np.int8)),
        Encoding("I32", 1, 4, _integers(np.int32)),
        Encoding("I64", 1, 8, _integers(np.int64)),
    )
}
"""Types of the tensors that make up matrices of quantised checkpoints from Hugging Face."""
