"""The client's part in making a sandbox: the choice of visible paths, variables and virtual environment.

The launcher can't choose these, because its own working directory and environment differ from the client's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from symphony.launcher.common.places import Refused

_OF_MANY = (
    *("/", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/var", "/var/run"),
    *("/dev/shm", "/tmp", "/var/tmp"),  # noqa: S108 - these are never shown
)
"""Directories with files of several owners or purposes. A sandbox never shows them as a whole."""
_OF_MACHINE = "/proc/", "/run/", "/sys/"
"""Prefixes of directories that a sandbox shows only if the user binds them."""


Shown = tuple[str, str, bool]
"""A visible path: its name inside the sandbox, its real path without links, and whether the program may write."""


def shown_to(path: str, cwd: str, python_path: str) -> tuple[list[Shown], list[str]]:
    """Return the paths that the sandbox shows read-only, and the directories that are empty in it.

    `path`: the program's path, as the user gave it.
    """
    ours = (os.environ.get(name, "") for name in ("HOME", "XDG_RUNTIME_DIR"))
    private = {*_OF_MANY, *(above for each in ours for above in _and_above(each))}

    def is_private(directory: str) -> bool:
        return directory in private or directory.startswith(_OF_MACHINE)

    file = os.path.abspath(os.path.join(cwd, path))
    real = os.path.realpath(file)
    wanted = [real if is_private(os.path.dirname(real)) else os.path.dirname(real), *_links(file), cwd]
    wanted += [os.path.abspath(os.path.join(cwd, each)) for each in python_path.split(os.pathsep) if each]
    shown = [(each, os.path.realpath(each), False) for each in dict.fromkeys(wanted) if os.path.exists(each)]
    empty = [cwd] if is_private(os.path.realpath(cwd)) else []
    return [each for each in shown if not (os.path.isdir(each[1]) and is_private(each[1]))], empty


def _links(path: str) -> list[str]:
    """Return the chain of symbolic links from `path` to its file. The chain begins with `path` if that is a link."""
    found = list[str]()
    while os.path.islink(path) and path not in found:
        found.append(path)
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return found


_NOT_OF_USERS = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "nix", "opt", "proc", "run", "sbin", "sys", "usr")
)


def home_of(env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the user's home directory: its name, and its real path without links. The sandbox mounts a private
    directory there. None: HOME is not an absolute path, or leads into a directory of the system.
    """
    home = env.get("HOME", "")
    real = os.path.realpath(home)
    return (home, real) if home.startswith("/") and real.split("/")[1] not in {*_NOT_OF_USERS, ""} else None


def _and_above(path: str) -> list[str]:
    """Return the real path of a directory, and all its parents."""
    if not path.startswith("/"):
        return []
    real = Path(os.path.realpath(path))
    return [str(each) for each in (real, *real.parents)]


_NEEDED = ("COLORTERM", "HOME", "LANG", "LANGUAGE", "LOGNAME", "NO_COLOR", "PATH", "SHELL", "TERM", "TZ", "USER")
_NEEDED_BY_PREFIX = ("LC_", "PYTHON")
"""Variables of the user's environment that programs get. These variables affect output and Python, and hold no secrets.
"""


def environment(own: Mapping[str, str], given: Iterable[tuple[str, str]], *, whole: bool) -> dict[str, str]:
    """Return a program's environment: the needed variables of `own`, overridden by `given`. `whole`: all of `own`."""
    kept = {name: value for name, value in own.items() if whole or _is_needed(name)}
    return {**kept, **dict(given)}


def _is_needed(name: str) -> bool:
    return name in _NEEDED or name.startswith(_NEEDED_BY_PREFIX)


def packages_of(venv: str) -> Path:
    """Return the site-packages of `venv`. Refused: `venv` is not a virtual environment, or has another Python."""
    found = Path(venv) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (Path(venv) / "pyvenv.cfg").is_file():
        raise Refused(f"{venv} is no virtual environment: make one with `python -m venv {venv}`")
    if not found.is_dir():
        ours = sys.version.split()[0]
        raise Refused(f"{venv} is of another Python than Symphony's, {ours}: make it with {sys.executable} -m venv")
    return found


OWN = ("/", "/dev", "/dev/pts", "/proc", "/run")
"""Directories that each sandbox makes itself, so the user can't bind them."""


def binds(given: Iterable[str]) -> list[Shown]:
    """Parse binds: PATH, PATH:ro or PATH:rw. Outer directories come first, since inner directories are mounted on them.
    Refused: a path does not exist, or can't be bound.
    """
    return sorted(map(_bind, given), key=lambda shown: len(Path(shown[1]).parts))


def _bind(text: str) -> Shown:
    path, colon, how = text.rpartition(":")
    if not colon or how not in ("ro", "rw"):
        path, how = text, "rw"
    if not path or not os.path.exists(path):
        raise Refused(f"{path or text} can't be shown to the program: there is no such file")
    real, writable = os.path.realpath(path), how == "rw"
    if real in OWN or real.startswith("/proc/"):
        raise Refused(f"{path} can't be bound: a sandbox has its own; bind the single directories that are needed")
    if writable and Path(real).is_relative_to("/sys"):
        raise Refused(f"{path} can't be bound to be written to: it is the kernel's; bind {path}:ro")
    return os.path.abspath(path), real, writable
