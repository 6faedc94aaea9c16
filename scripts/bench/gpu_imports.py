"""Imports from this source tree without a build, for a GPU machine that has only torch and Triton."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_source_tree() -> None:
    """Make the source tree importable; call this before any import from it.

    `libsym` becomes an empty package, because its `__init__` needs the C extension. Its constants and errors do not.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]
    bare = types.ModuleType("libsym")
    bare.__path__ = [str(ROOT / "libsym")]
    sys.modules["libsym"] = bare
    # The kernels' tests need deterministic references. cuBLAS is deterministic only if this variable is set before
    # torch is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
