"""bfloat16, float8 and matrix products in Triton's interpreter, as a GPU computes them.

A row of a matrix product has the same bits on a GPU however many rows there are, and numpy's BLAS promises
nothing of the kind. So products are summed in float64 and rounded once.

The interpreter (3.6 to 3.9) keeps bfloat16 as its 16 bits in a uint16 array. Its matrix product then
multiplies the bit patterns as integers, and its conversion from float32 truncates, where a GPU
multiplies the values and rounds to the nearest even. Its conversion to float8 loses the smallest numbers.
These are mended here, so that the kernels under test stay those that a GPU runs.
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
    plain_cast = InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *_):
        assert d.dtype.scalar == tl.float32, d.dtype
        product = _widened(a).data.astype(np.float64) @ _widened(b).data.astype(np.float64)
        return TensorHandle((product + d.data).astype(np.float32), tl.float32)

    def cast_impl(self, source, target_type):
        if source.dtype.scalar == tl.float32 and target_type.scalar == tl.bfloat16:
            return TensorHandle(_rounded(source.data).reshape(source.data.shape), tl.bfloat16)
        return plain_cast(self, source, target_type)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


def mend_float8(monkeypatch) -> None:
    plain_cast = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, source, target_type, rounding_mode):
        if source.dtype.scalar == tl.float32 and target_type.scalar == tl.float8e4nv:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return TensorHandle(rounded.view(torch.uint8).numpy().reshape(source.data.shape), tl.float8e4nv)
        if source.dtype.scalar == tl.float8e4nv and target_type.scalar == tl.float32:
            exact = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn).float()
            return TensorHandle(exact.numpy().reshape(source.data.shape), tl.float32)
        return plain_cast(self, source, target_type, rounding_mode)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
