"""Compiles `decoder.cpu._step`: the CPU step, in every instruction set that the target can have."""

import os
from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent

ffi = FFI()
ffi.cdef((_HERE / "step.h").read_text(encoding="utf-8"))
ffi.set_source(
    "decoder.cpu._step",
    (_HERE / "step.c").read_text(encoding="utf-8"),
    sources=[os.path.relpath(path) for path in sorted(_HERE.glob("*.c")) if path.name != "step.c"],
    include_dirs=[str(_HERE)],
    depends=[str(path) for path in sorted(_HERE.glob("*.[ch]"))],
    # No contraction behind our back: where a product and a sum round once, the kernels say so.
    extra_compile_args=[
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O3",
        "-g1",  # lines for a backtrace: with all of it the compiler takes four times as long
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-Wall",
        "-Wno-unused-function",
    ],
    libraries=["m", "pthread"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
