"""Builds `kvfs._pages`: the hash of `digest.c`, the free pages of `free_list.c`, the references of `counts.c`.

`columns.h` declares the columns of a pool, and has no code.
"""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent
_PARTS = ("digest", "free_list", "counts")
_HEADERS = ("columns", *_PARTS)

ffi = cffi.FFI()
for header in _HEADERS:
    ffi.cdef(re.sub(r"^#.*\n", "", (_HERE / f"{header}.h").read_text(encoding="utf-8"), flags=re.MULTILINE))
ffi.cdef("""
void *mmap(void *address, size_t num_bytes, int what, int flags, int file, long offset);
int madvise(void *address, size_t num_bytes, int how);
int mprotect(void *address, size_t num_bytes, int what);
int munmap(void *address, size_t num_bytes);
""")
ffi.set_source(
    "kvfs._pages",
    "#include <sys/mman.h>\n" + "".join(f'#include "{header}.h"\n' for header in _HEADERS),
    sources=[os.path.relpath(_HERE / f"{part}.c") for part in _PARTS],
    depends=[str(_HERE / f"{header}.h") for header in _HEADERS],
    include_dirs=[str(_HERE)],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
