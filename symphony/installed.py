"""What is installed beside this command: what an installation lacks, and packages that are somebody else's.

The base installation has what a program needs; the extra `server` brings what the daemon needs. All packages are in one
directory. PyPI has some of their names, too: what is installed from there later takes the place of ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGES = ("libsym", "kvfs", "decoder", "triton_kernels", "scheduler", "symphony", "lips")
HERE = Path(__file__).resolve().parents[1]
"""Where all of them are."""
_DISTRIBUTION = "symphony-os"
_NO_SHIM = (
    "this installation was built without libfuse's headers, and can't mount: install libfuse3-dev and pkg-config, then "
    "build and install Symphony again"
)


def what_to_install(error: ImportError) -> str:
    """One line on what a command lacks, or on what is in its way. Anything else is a defect, and raised again."""
    name = error.name or ""
    package = name.partition(".")[0]
    if name == "kvfs._shim":
        return _NO_SHIM
    if package == "pyfuse3" and not isinstance(error, ModuleNotFoundError):
        return f"pyfuse3 can't be loaded ({error}): install the package fuse3, or pyfuse3 again"
    if isinstance(error, ModuleNotFoundError) and package not in (*PACKAGES, ""):
        extra = "gpu" if package in ("torch", "triton") else "server"
        return f"this needs {package}, which the base installation lacks: pip install '{_DISTRIBUTION}[{extra}]'"
    for conflict in foreign_packages():
        return conflict
    raise error


def foreign_packages() -> Iterator[str]:
    """Packages that are imported from elsewhere, or that another distribution has written over."""
    yield from misplaced_packages()
    owners = packages_distributions()
    for package in PACKAGES:
        if others := {each for each in owners.get(package, ()) if each != _DISTRIBUTION}:
            names = ", ".join(sorted(others))
            yield f"{package} was written over by {names}: pip uninstall {names}, then install Symphony again"


def misplaced_packages() -> Iterator[str]:
    """Those that are imported from elsewhere. What they lack would be found in ours: no import need fail."""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.origin:
            yield f"{package} is missing beside {HERE / 'symphony'}: install Symphony again"
        elif Path(found.origin).resolve().parent.parent != HERE:
            yield f"{package} is imported from {found.origin}, and belongs to {HERE}: remove that, or clear PYTHONPATH"
