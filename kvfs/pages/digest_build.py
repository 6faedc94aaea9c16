"""Builds `kvfs._digest`, the hash of `digest.c`."""

from pathlib import Path

import cffi

ffi = cffi.FFI()
ffi.cdef("""
    int digest_is_fast(void);
    void digest_pages(const uint8_t *const pages[], uint64_t page_bytes, uint8_t *out);
""")
ffi.set_source(
    "kvfs._digest",
    (Path(__file__).parent / "digest.c").read_text(encoding="utf-8"),
    extra_compile_args=["-O3", "-Wall", "-Wno-psabi"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
