"""Imports of this source tree where nothing was built: a GPU machine has torch and Triton, and no more."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_source_tree() -> None:
    """Before anything of the tree is imported. `libsym` becomes a bare package: its face needs its C extension, and
    its numbers and errors do not."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]
    bare = types.ModuleType("libsym")
    bare.__path__ = [str(ROOT / "libsym")]
    sys.modules["libsym"] = bare
    # The kernels' tests ask for deterministic references, and cuBLAS for this; it is read when torch is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
