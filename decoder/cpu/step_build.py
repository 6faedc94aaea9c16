"""Compile `decoder.cpu._step`: the CPU step, for every instruction set that the target may have."""

import os
import re
from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent
_LIBSYM = _HERE.parents[1] / "libsym"


def _declarations(header: Path) -> str:
    """Return a header without its preprocessor lines, except definitions of numbers."""
    return re.sub(r"^#(?!define \w+ \d+$).*\n", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE)


ffi = FFI()
ffi.cdef(_declarations(_LIBSYM / "steps.h"))
ffi.cdef(_declarations(_HERE / "step.h"))
ffi.set_source(
    "decoder.cpu._step",
    '#include "step.h"\n',
    sources=[os.path.relpath(path) for path in sorted(_HERE.glob("*.c")) if path.stem[0] != "_"],
    include_dirs=[str(_HERE), str(_LIBSYM)],
    depends=[str(_LIBSYM / "steps.h"), *map(str, sorted(_LIBSYM.glob("simd/*.h")))]
    + [str(path) for path in sorted(_HERE.glob("*.[ch]")) if path.stem[0] != "_"],
    # The compiler must not fuse products and sums. Where a product and a sum are rounded once, a kernel calls fma.
    extra_compile_args=[
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O3",
        "-g1",  # line numbers for backtraces; with -g, compiling takes four times as long
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
    ],
    libraries=["m", "pthread"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
