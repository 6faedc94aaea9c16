"""Warning for the user about files that a sandbox hides from its program, with the `--bind` that would show them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from symphony.launcher.common.confinement import OWN, Shown
from symphony.launcher.common.finding import shipped
from symphony.launcher.sandbox.view import Shown as OfSystem
from symphony.launcher.sandbox.view import system_view

KV_KIND = "fuse.kv"
_OF_SANDBOX = "/dev", "/proc", "/sys"
"""Directories that each sandbox replaces by its own. No `--bind` is advised for files below them."""
_NEW_FILE = re.compile(r"\S*(?:/\S*|\w\.[A-Za-z]\w*)")
"""Pattern of an argument that may name a file for the program to create: a path, or a name with a suffix."""
_ON_THE_MOUNT = ".kv"
"""Suffix of KV files. A program creates them on the mount, which sandboxes show."""


def hidden_line(path: str, cwd: str, arguments: Iterable[str], shows: Sequence[Shown]) -> str | None:
    """Return the warning for the program at `path`, whose sandbox shows `shows`. None: no relevant file is hidden.

    For a user's own program, its directory and the working directory are checked, too. A program that ships with
    Symphony needs no files beside it.
    """
    visible = [*_system(), *(real for _, real, _ in shows)]

    def is_hidden(real: str) -> bool:
        return real not in OWN and not any(real == each or real.startswith(f"{each.rstrip('/')}/") for each in visible)

    named, remedies = list[str](), dict[str, str]()

    def covered(directory: str, how: str) -> bool:
        return any(remedies.get(str(above)) in ("", how) for above in Path(directory).parents)

    if Path(path) not in shipped().values():
        for directory in (os.path.dirname(os.path.realpath(path)), cwd):
            if is_hidden(os.path.realpath(directory)):
                named.append(directory)
                remedies[directory] = ":ro"
    for argument in arguments:
        file = os.path.join(cwd, argument.partition("=")[2] if argument.startswith("-") else argument)
        directory = os.path.dirname(os.path.abspath(file))
        if file == os.path.join(cwd, "") or not is_hidden(os.path.realpath(file)):
            continue
        if os.path.exists(file):
            named.append(argument)
            remedies.setdefault(os.path.abspath(file), ":ro")
        elif argument.endswith(_ON_THE_MOUNT) or not _NEW_FILE.fullmatch(argument):
            continue
        elif os.path.isdir(directory) and is_hidden(os.path.realpath(directory)):
            named.append(argument)
            remedies[directory] = ""
    if not named:
        return None
    options = " ".join(f"--bind {shlex.quote(each)}{how}" for each, how in remedies.items() if not covered(each, how))
    hidden = ", ".join(dict.fromkeys(named))
    return f"the sandbox hides {hidden} from the program; to show it: symphony run {options} ..."


def _system() -> list[str]:
    """Return the paths that every sandbox shows: system paths, and mounts of the KV file system."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        kv = [where for _, where, kind, *_ in map(str.split, mounts) if kind == KV_KIND]
    return [*_OF_SANDBOX, *(each.path for each in system_view() if isinstance(each, OfSystem)), *kv]
