"""Weights in the types of a GGUF file."""

from pathlib import Path

import gguf
import numpy as np

from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Weights
from decoder.cpu._step import ffi, lib

HALVES = {  # offset and usual size of each float16 in a block, for weights of about 0.06
    "Q4_K": {0: 2.4e-4, 2: 1.8e-3},
    "Q5_K": {0: 1.2e-4, 2: 1.9e-3},
    "Q6_K": {208: 4.5e-5},
    "Q2_K": {80: 4e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 5e-5},
    "MXFP4": {},
}


def random_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of any codes and factors, with scales of a usual size and any sign."""
    blocks = rng.integers(0, 256, (num_blocks, ENCODINGS[kind].block_bytes), dtype=np.uint8)
    signs = rng.choice([-1, 1], num_blocks)  # scale and min change their sign together, so that the mean stays near 0
    for at, size in HALVES[kind].items():
        halves = (rng.uniform(0.5, 1.5, num_blocks) * size * signs).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(117, 122, num_blocks)
    return blocks


def blocks_of(name: str, kind: str, shape: tuple[int, ...], blocks: np.ndarray) -> StoredTensor:
    return StoredTensor(name, Path("memory"), ENCODINGS[kind], shape, blocks.reshape(-1).data)


def replaced(weights: Weights, *tensors: StoredTensor, **options) -> Weights:
    stored = {name: weights.stored(name) for name in weights.names()}
    return Weights(stored | {tensor.name: tensor for tensor in tensors}, **options)


def quantized(weights: Weights, *kinds: str) -> Weights:
    """The matrices in these GGUF types in turn, where whole blocks fit; the rest stays float32.

    The package gguf makes no blocks of K types: such matrices become random ones.
    """
    tensors, rng = [], np.random.default_rng(5)
    for index, name in enumerate(weights.names()):
        values, kind = weights.read(name), kinds[index % len(kinds)]
        if values.ndim == 2 and kind in HALVES:
            blocks = random_blocks(kind, values.size // ENCODINGS[kind].block_values, rng)
            tensors.append(blocks_of(name, kind, values.shape, blocks))
        elif values.ndim == 2 and values.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            tensors.append(blocks_of(name, kind, values.shape, blocks))
    return replaced(weights, *tensors)


def unpacked(matrix, row: int, size: int) -> np.ndarray:
    out = np.empty(size, np.float32)
    lib.sym_unpack_row(matrix, row, size, ffi.cast("float *", out.ctypes.data))
    return out
