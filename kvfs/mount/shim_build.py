"""Builds `kvfs._shim`, the interposer of `shim.c`."""

import re
from pathlib import Path

import cffi

SOURCE = (Path(__file__).parent / "shim.c").read_text(encoding="utf-8")

_CALLED_BACK = re.search(r"/\* In Python \*/\n(.*?)\n\n", SOURCE, re.DOTALL)
assert _CALLED_BACK is not None

ffi = cffi.FFI()
ffi.cdef(
    """
    typedef ... *fuse_req_t;
    enum { ANSWER_LATER, ANSWER_DATA, OUT_BYTES, ... };
    extern char kvfs_out[];
    extern const void *kvfs_data;
    extern size_t kvfs_data_bytes;
    extern long kvfs_linger_ns;
    void kvfs_answer(fuse_req_t req, int status);
    void kvfs_watch(fuse_req_t req);
    uint32_t kvfs_uid(fuse_req_t req);
    int kvfs_session_captured(void);
    void kvfs_forget_session(void);
    """
    + _CALLED_BACK[1].replace("static ", 'extern "Python" ')
)
ffi.set_source(
    "kvfs._shim",
    SOURCE,
    libraries=["fuse3"],
    include_dirs=["/usr/include/fuse3"],
    extra_compile_args=["-O2", "-Wall", "-D_FILE_OFFSET_BITS=64"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
