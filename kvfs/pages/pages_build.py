"""Builds `kvfs._pages`: the hash of `digest.c`, the free pages of `free_list.c`, the references of `counts.c`."""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent
_PARTS = ("digest", "free_list", "counts")

ffi = cffi.FFI()
for part in _PARTS:
    ffi.cdef(re.sub(r"^#.*\n", "", (_HERE / f"{part}.h").read_text(encoding="utf-8"), flags=re.MULTILINE))
ffi.set_source(
    "kvfs._pages",
    "".join(f'#include "{part}.h"\n' for part in _PARTS),
    sources=[os.path.relpath(_HERE / f"{part}.c") for part in _PARTS],
    depends=[str(_HERE / f"{part}.h") for part in _PARTS],
    include_dirs=[str(_HERE)],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
