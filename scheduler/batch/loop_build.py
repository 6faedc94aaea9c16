"""Build of `scheduler._loop`, the C module that runs steps without the interpreter."""

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
    "joining.c",
    "layout.c",
    "results.c",
    "generation.c",
    "group.c",
    "draft.c",
    "streams.c",
    "times.c",
    "room.c",
)
HEADERS = ("cost.h", "policy.h", "streams.h", "generation.h", "group.h", "loop.h")
GATE_HEADERS = ("connection.h", "stays.h")
"""Headers whose declarations Python sees. Each header stands behind the headers that it needs."""
_LIBSYM = _HERE.parents[1] / "libsym"
_CORE, _GATE = _HERE.parents[1] / "kvfs/core", _HERE.parent / "core"
OTHERS = tuple(sorted(path for room in (_GATE, _CORE) for path in room.glob("*.c")))
"""Sources from other folders. Several modules may compile the core, because it has no global state."""


def _declarations(header: Path) -> str:
    """Return a header without preprocessor lines, except definitions of numbers."""
    return re.sub(r"^#(?!define \w+ \d+$).*\n", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _pages() -> FFI:
    """Return the builder of `kvfs._pages`, whose types this module uses, too."""
    found: FFI = runpy.run_path(str(_CORE.parent / "pages/pages_build.py"))["ffi"]
    return found


def builder(sources: Sequence[str]) -> FFI:
    """Return the builder of the module. `sources`: all its C files; a benchmark may replace some."""
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
