"""Weights in the types of a GGUF file."""

from pathlib import Path

import gguf
import numpy as np

from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Weights
from decoder.cpu._step import ffi, lib


def blocks_of(name: str, kind: str, shape: tuple[int, ...], blocks: np.ndarray) -> StoredTensor:
    return StoredTensor(name, Path("memory"), ENCODINGS[kind], shape, blocks.reshape(-1).data)


def replaced(weights: Weights, *tensors: StoredTensor, **options) -> Weights:
    stored = {name: weights.stored(name) for name in weights.names()}
    return Weights(stored | {tensor.name: tensor for tensor in tensors}, **options)


def quantized(weights: Weights, *kinds: str) -> Weights:
    """The matrices in these GGUF types in turn, where whole blocks of 32 fit; the rest stays float32."""
    tensors = []
    for index, name in enumerate(weights.names()):
        values, kind = weights.read(name), kinds[index % len(kinds)]
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            tensors.append(blocks_of(name, kind, values.shape, blocks))
    return replaced(weights, *tensors)


def unpacked(matrix, row: int, size: int) -> np.ndarray:
    out = np.empty(size, np.float32)
    lib.sym_unpack_row(matrix, row, size, ffi.cast("float *", out.ctypes.data))
    return out
