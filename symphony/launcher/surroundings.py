"""Where launcher and zygote find this package, and with what environment they run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
"""Where the packages are."""
_KEPT = ("HOME", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV")


def surroundings() -> dict[str, str]:
    """The environment: nothing of the client's that a program could see, or that would change how it runs."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    is_installed = ROOT.endswith(("site-packages", "dist-packages"))
    return {"LANG": "C.UTF-8", **kept} if is_installed else {"LANG": "C.UTF-8", "PYTHONPATH": ROOT, **kept}
