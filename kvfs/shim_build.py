"""Builds `kvfs._shim`, the interposer of `shim.c`."""

from pathlib import Path

import cffi

ffi = cffi.FFI()
ffi.cdef("""
    typedef ... *fuse_req_t;
    extern "Python" void kvfs_copy_file_range(fuse_req_t req, uint64_t source, int64_t source_offset,
                                              uint64_t target, int64_t target_offset, uint64_t size);
    int kvfs_session_captured(void);
    void kvfs_forget_session(void);
    int fuse_reply_err(fuse_req_t req, int error);
    int fuse_reply_write(fuse_req_t req, size_t count);
""")
ffi.set_source(
    "kvfs._shim",
    (Path(__file__).parent / "shim.c").read_text(encoding="utf-8"),
    libraries=["fuse3"],
    include_dirs=["/usr/include/fuse3"],
    extra_compile_args=["-O2", "-Wall", "-D_FILE_OFFSET_BITS=64"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
