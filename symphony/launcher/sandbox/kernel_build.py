"""Build of `symphony.launcher._kernel`: the system calls of a sandbox, with constants from the kernel's headers."""

import os
import re
from pathlib import Path

import cffi

_HERE = Path(__file__).resolve().parent
_HEADERS = "#include <sched.h>\n#include <sys/mount.h>\n"
_NUMBERS = (
    "CLONE_NEWNS CLONE_NEWCGROUP MS_NOSUID MS_NODEV MS_NOEXEC MS_BIND MS_REC MS_SLAVE MS_PRIVATE MS_SHARED MNT_DETACH"
)
_GLIBC = """
int mount(const char *source, const char *target, const char *kind, unsigned long flags, const char *options);
int umount2(const char *target, int flags);
int unshare(int flags);
"""

ffi = cffi.FFI()
ffi.cdef("".join(f"#define {name} ...\n" for name in _NUMBERS.split()) + _GLIBC)
ffi.cdef(re.sub(r"^#.*\n", "", (_HERE / "kernel.h").read_text(encoding="utf-8"), flags=re.MULTILINE))
ffi.set_source(
    "symphony.launcher._kernel",
    f'{_HEADERS}#include "kernel.h"\n',
    sources=[os.path.relpath(_HERE / name) for name in ("kernel.c", "filter.c", "first.c")],
    depends=[str(_HERE / "kernel.h")],
    include_dirs=[str(_HERE)],
    extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
