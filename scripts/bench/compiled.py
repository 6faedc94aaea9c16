"""C of a benchmark, compiled with the system's compiler when it is needed; no file of it is kept."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "library.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return ctypes.CDLL(str(library))
