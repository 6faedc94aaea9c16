"""Builds the module `kvfs._shim` from `shim.c`."""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent
_DECLARATIONS, _, _CALLED_BACK = (
    re.sub(r"^#.*\n", "", (_HERE / "shim.h").read_text(encoding="utf-8"), flags=re.MULTILINE)
).partition("/* In Python */")

ffi = cffi.FFI()
ffi.cdef("typedef ... *fuse_req_t;\n" + _DECLARATIONS + 'extern "Python+C" {' + _CALLED_BACK + "}")
ffi.set_source(
    "kvfs._shim",
    '#include "shim.h"\n',
    sources=[os.path.relpath(_HERE / name) for name in ("shim.c", "kept_names.c")],
    depends=[str(_HERE / name) for name in ("shim.h", "kept_names.h")],
    include_dirs=[str(_HERE), "/usr/include/fuse3"],
    # All symbols are hidden, except for the functions that replace functions of libfuse.
    extra_compile_args=[
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-D_FILE_OFFSET_BITS=64",
        "-O2",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
    ],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
