"""Compiles `scheduler._loop`: steps that follow each other without the interpreter."""

from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent


def _declarations(path: Path) -> str:
    """A header without its preprocessor's lines."""
    return "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if not line.startswith("#"))


ffi = FFI()
ffi.cdef(_declarations(_ROOT / "libsym" / "hot.h"))
ffi.cdef("typedef ... sym_batch;\n" + _declarations(_HERE / "loop.h"))
ffi.set_source(
    "scheduler._loop",
    (_HERE / "loop.c").read_text(encoding="utf-8"),
    include_dirs=[str(_HERE), str(_ROOT / "libsym"), str(_ROOT / "decoder" / "cpu")],
    depends=[str(_HERE / "loop.h"), str(_ROOT / "libsym" / "hot.h"), str(_ROOT / "decoder" / "cpu" / "step.h")],
    extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra"],
    libraries=["pthread"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
