"""Find packages that this installation lacks, or that another distribution has overwritten.

The base installation has the dependencies of programs. The extra `server` adds the dependencies of the daemon.
Symphony's own packages all lie in one directory. PyPI has other distributions with packages of the same names. If `pip`
installs such a distribution later, its packages overwrite Symphony's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGES = ("libsym", "kvfs", "decoder", "triton_kernels", "scheduler", "symphony", "lips")
HERE = Path(__file__).resolve().parents[2]
"""Directory that holds all packages of Symphony."""
_DISTRIBUTION = "symphony-os"
_EXTRAS = {"torch": "gpu", "triton": "gpu", "cryptography": "fleet"}
_NO_SHIM = (
    "this installation was built without libfuse's headers, and can't mount: install libfuse3-dev and pkg-config, then "
    "build and install Symphony again"
)


def what_to_install(error: ImportError) -> str:
    """Return advice on a package that is missing or overwritten. An import error with another cause is raised again."""
    name = error.name or ""
    package = name.partition(".")[0]
    if name == "kvfs._shim":
        return _NO_SHIM
    if package == "pyfuse3" and not isinstance(error, ModuleNotFoundError):
        return f"pyfuse3 can't be loaded ({error}): install the package fuse3, or pyfuse3 again"
    if isinstance(error, ModuleNotFoundError) and package not in (*PACKAGES, ""):
        extra = _EXTRAS.get(package, "server")
        return f"this needs {package}, which the base installation lacks: pip install '{_DISTRIBUTION}[{extra}]'"
    for conflict in foreign_packages():
        return conflict
    raise error


def foreign_packages() -> Iterator[str]:
    """Yield a line for each package that is missing, imported from elsewhere, or overwritten."""
    yield from misplaced_packages()
    owners = packages_distributions()
    for package in PACKAGES:
        if others := {each for each in owners.get(package, ()) if each != _DISTRIBUTION}:
            names = ", ".join(sorted(others))
            yield f"{package} was written over by {names}: pip uninstall {names}, then install Symphony again"


def misplaced_packages() -> Iterator[str]:
    """Yield a line for each package that is missing, or imported from elsewhere.
    Imports may succeed even then: if the other package lacks a module, Python may find the module in our package.
    """
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.origin:
            yield f"{package} is missing beside {HERE / 'symphony'}: install Symphony again"
        elif Path(found.origin).resolve().parent.parent != HERE:
            yield f"{package} is imported from {found.origin}, and belongs to {HERE}: remove that, or clear PYTHONPATH"
