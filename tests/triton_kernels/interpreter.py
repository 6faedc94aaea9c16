"""bfloat16 in Triton's interpreter, as a GPU computes it.

The interpreter (3.6 to 3.9) keeps bfloat16 as its 16 bits in a uint16 array. Its matrix product then
multiplies the bit patterns as integers, and its conversion from float32 truncates, where a GPU
multiplies the values and rounds to the nearest even. Both are mended here, so that the kernels under
test stay those that a GPU runs.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(data: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()


def mend_bfloat16(monkeypatch) -> None:
    plain_dot = InterpreterBuilder.create_dot
    plain_cast = InterpreterBuilder.cast_impl

    def create_dot(self, a, b, *rest):
        return plain_dot(self, _widened(a), _widened(b), *rest)

    def cast_impl(self, source, target_type):
        if source.dtype.scalar == tl.float32 and target_type.scalar == tl.bfloat16:
            return TensorHandle(_rounded(source.data).reshape(source.data.shape), tl.bfloat16)
        return plain_cast(self, source, target_type)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
