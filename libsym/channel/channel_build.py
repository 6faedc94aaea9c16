"""Builds `libsym._channel`: the C halves of the channel and the arithmetic over rows of logits."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
LIBSYM = HERE.parent
FOLDERS = (LIBSYM, HERE, LIBSYM / "rows", LIBSYM / "simd")


def _declarations(header: Path) -> str:
    """Return a header without preprocessor lines, except definitions of numbers."""
    return re.sub(r"^#(?!define \w+ \d+$).*\n", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _abi() -> str:
    """Return the part of abi.h that Python reads: numbers, enums, and the structures of reduced rows."""
    text = (LIBSYM / "abi.h").read_text(encoding="utf-8")
    numbers = re.findall(r"^#define (SYM_\w+) \S", text, re.MULTILINE)
    enums = re.findall(r"^enum \w+ \{.*?\};", text, re.MULTILINE | re.DOTALL)
    structs = re.findall(r"^struct sym_(?:reduced|scored) \{.*?\};", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*(f"#define {number} ..." for number in numbers), *enums, *structs])


ffi = FFI()
ffi.cdef(_abi())
for _header in (
    "steps.h",
    "channel/json_size.h",
    "channel/region.h",
    "channel/server.h",
    "channel/client.h",
    "rows/rows.h",
):
    ffi.cdef(_declarations(LIBSYM / _header))
# Fields that Python reads directly: the replies of a call, and whether a connection is dead.
ffi.cdef("struct sym_call { sym_answer *answers; ...; };")
ffi.cdef("struct sym_client { int dead; ...; };")
ffi.set_source(
    "libsym._channel",
    '#include "client_state.h"\n#include "json_size.h"\n#include "rows.h"\n#include "server.h"\n',
    sources=[os.path.relpath(path) for folder in FOLDERS for path in sorted(folder.glob("*.c")) if path.stem[0] != "_"],
    include_dirs=[str(folder) for folder in FOLDERS],
    depends=[str(path) for folder in FOLDERS for path in sorted(folder.glob("*.[ch]")) if path.stem[0] != "_"],
    # No contraction: a row must give the same bits on machines with and without fused multiply-adds.
    extra_compile_args=[
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O2",
        "-fvisibility=hidden",  # calls between units need no indirection
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
    ],
    libraries=["m", "pthread"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
