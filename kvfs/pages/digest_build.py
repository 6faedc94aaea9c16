"""Builds `kvfs._digest`, the hash of `digest.c`."""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent

ffi = cffi.FFI()
ffi.cdef(re.sub(r"^#.*\n", "", (_HERE / "digest.h").read_text(encoding="utf-8"), flags=re.MULTILINE))
ffi.set_source(
    "kvfs._digest",
    '#include "digest.h"\n',
    sources=[os.path.relpath(_HERE / "digest.c")],
    depends=[str(_HERE / "digest.h")],
    include_dirs=[str(_HERE)],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
