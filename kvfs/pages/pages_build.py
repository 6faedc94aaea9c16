"""Builds `kvfs._pages`: the core, and the hash of `digest.c`."""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parent / "core"
_HEADERS = [*(_CORE / f"{name}.h" for name in ("columns", "counts", "free_list", "core")), _HERE / "digest.h"]
_SOURCES = [*sorted(_CORE.glob("*.c")), _HERE / "digest.c"]

ffi = cffi.FFI()
for header in _HEADERS:
    ffi.cdef(re.sub(r"^#.*\n", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE))
ffi.cdef("""
void *mmap(void *address, size_t num_bytes, int what, int flags, int file, long offset);
int madvise(void *address, size_t num_bytes, int how);
int mprotect(void *address, size_t num_bytes, int what);
int munmap(void *address, size_t num_bytes);
int sync_file_range(int file, int64_t offset, int64_t num_bytes, unsigned int flags);
long syscall(long number, int directory, const char *path, const void *how, size_t how_bytes);
""")
ffi.set_source(
    "kvfs._pages",
    "#include <fcntl.h>\n#include <sys/mman.h>\n#include <unistd.h>\n"
    + "".join(f'#include "{header.name}"\n' for header in _HEADERS),
    sources=[os.path.relpath(source) for source in _SOURCES],
    depends=[str(header) for header in (*_HEADERS, _CORE / "inside.h")],
    include_dirs=[str(_HERE), str(_CORE)],
    extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
