"""The environment variables of a launcher and its zygote, and the directory where they find this package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
"""Directory of Symphony's packages."""
_KEPT = ("HOME", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "XDG_STATE_HOME")


def surroundings() -> dict[str, str]:
    """Return the environment of a launcher: the client's variables that don't change how programs run.
    If this package is not installed, PYTHONPATH leads to it.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    is_installed = ROOT.endswith(("site-packages", "dist-packages"))
    return {"LANG": "C.UTF-8", **kept} if is_installed else {"LANG": "C.UTF-8", "PYTHONPATH": ROOT, **kept}
