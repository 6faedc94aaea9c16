"""bfloat16, float8 and matrix products in Triton's interpreter, as a GPU computes them.

A row of a matrix product has the same bits on a GPU however many rows there are, and numpy's BLAS promises
nothing of the kind. So products are summed in float64 and rounded once.

The interpreter (3.6 to 3.9) keeps bfloat16 as its 16 bits in a uint16 array. Its matrix product then
multiplies the bit patterns as integers, and its conversion from float32 truncates, where a GPU
multiplies the values and rounds to the nearest even. Its conversion to float8 loses the smallest numbers.
These are mended here, so that the kernels under test stay those that a GPU runs.

And it takes its time over what changes nothing: `hasten()`.
"""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
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


def hasten() -> None:
    """The same numbers in half of the time: leaves out what the interpreter does again and again.

    It puts its functions into `triton.language` at each launch, and at each call of a kernel's own functions. It makes
    its table of numpy's types at each look. And it computes every sum of integers in 64 bits, too, to assert that
    nothing overflows, but asserts in debug mode alone.
    """
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


class _PatchOnce:
    """Patches that stay for the rest of the process: nothing else in it uses the language."""

    def __init__(self, patch) -> None:
        self._patch, self._done = patch, set[object]()

    def __call__(self, function):
        if function not in self._done:
            self._done.add(function)
            self._patch(function)
        return interpreter._LangPatchScope()  # without changes, which would be undone after the launch


class _NumpyTypes:
    def __init__(self, look_up) -> None:
        self._look_up, self._found = look_up, dict[str, object]()

    def __call__(self, kind):
        name = kind.scalar.name
        if name not in self._found:
            self._found[name] = self._look_up(kind)
        return self._found[name]
