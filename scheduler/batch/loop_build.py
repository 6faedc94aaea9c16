"""Compiles `scheduler._loop`: steps that follow each other without the interpreter."""

import os
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent
SOURCES = (
    "cost.c",
    "policy.c",
    "order.c",
    "loop.c",
    "facts.c",
    "members.c",
    "layout.c",
    "results.c",
    "generation.c",
    "draft.c",
    "streams.c",
    "times.c",
)
HEADERS = ("cost.h", "policy.h", "streams.h", "generation.h", "loop.h")
GATE_HEADERS = ("connection.h", "stays.h")
"""Headers that Python sees, in the order that they need."""
_LIBSYM = _HERE.parents[1] / "libsym"
_CORE, _GATE = _HERE.parents[1] / "kvfs/core", _HERE.parent / "core"
OTHERS = tuple(sorted(path for room in (_GATE, _CORE) for path in room.glob("*.c")))
"""Sources of other rooms: the core has no state of its own, so each module may have it."""


def _declarations(header: Path) -> str:
    """A header without its preprocessor's lines, but for numbers."""
    return re.sub(r"^#(?!define \w+ \d+$).*\n", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _pages() -> FFI:
    """Return the builder of `kvfs._pages`: its types are known here, too."""
    found: FFI = runpy.run_path(str(_CORE.parent / "pages/pages_build.py"))["ffi"]
    return found


def builder(sources: Sequence[str]) -> FFI:
    """Return what compiles the module of all its sources, of which a benchmark may have replaced some."""
    ffi = FFI()
    ffi.include(_pages())
    ffi.cdef(_declarations(_LIBSYM / "steps.h"))
    ffi.cdef('extern "Python" int sym_callback_step(sym_decoder *decoder, const sym_batch *batch);')  # callback_step.py
    for name in HEADERS:
        ffi.cdef(_declarations(_HERE / name))
    for name in GATE_HEADERS:
        ffi.cdef(_declarations(_GATE / name))
    ffi.set_source(
        "scheduler._loop",
        '#include "loop.h"\n#include "policy.h"\n#include "streams.h"\n#include "stays.h"\n',
        sources=list(sources),
        include_dirs=[str(folder) for folder in (_HERE, _LIBSYM, _GATE, _CORE)],
        depends=[
            *(str(_HERE / name) for name in (*HEADERS, "loop_state.h", "plan.h")),
            *(str(path) for room in (_GATE, _CORE) for path in sorted(room.glob("*.h"))),
            *(str(_LIBSYM / name) for name in ("abi.h", "steps.h")),
        ],
        extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
        libraries=["m", "pthread"],
    )
    return ffi


ffi = builder([os.path.relpath(path) for path in (*(_HERE / name for name in SOURCES), *OTHERS)])

if __name__ == "__main__":
    ffi.compile(verbose=True)
