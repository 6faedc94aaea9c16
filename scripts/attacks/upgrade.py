#!/usr/bin/env python3
"""Files of another owner, and a lock that another user holds, obstruct scripts/install and scripts/uninstall.

    .venv/bin/python scripts/attacks/upgrade.py [--quick] [--tree CHECKOUT]

A temporary directory has the parts of two versions that a rollback and a removal need. Another user holds every lock
that an unprivileged user can get. Another program has put a file where the previous version has a unit. This file and
the running version must stay as they were. Needs root.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attacked import ATTACKER, options, verdict

VERSIONS = "7.1", "7.2"
UNIT, OWN = (f"/usr/local/{path}" for path in ("lib/systemd/system/symphony.service", "bin/symphony"))
WORDS = "somebody else's\n"


class Machine:
    """Directory as `scripts/install --root` leaves it. Version 7.2 is current, and lacks a unit that 7.1 has."""

    def __init__(self, root: Path, tree: Path) -> None:
        self.root, self.tree, self.prefix = root, tree, root / "opt/symphony"
        for version in VERSIONS:
            here = self.prefix / version
            self._write(here / "bin/symphony", "#!/bin/sh\n", mode=0o755)
            self._write(here / "stamp", version)
            self._write(here / "symphony.toml", "")
            paths = sorted((OWN, UNIT)) if version == "7.1" else [OWN]
            for path in paths:
                self._write(Path(f"{here}/files{path}"), f"of {version}\n")
            self._write(here / "files.list", "".join(f"{path}\n" for path in paths))
        self._write(self.prefix / "files.list", f"{OWN}\n")
        (root / "usr/local/bin").mkdir(parents=True)
        (root / "usr/local/bin/symphony").symlink_to("../../../opt/symphony/current/bin/symphony")
        for name, version in (("current", "7.2"), ("previous", "7.1")):
            (self.prefix / name).symlink_to(version)
        self._write(self.prefix / ".lock", "", mode=0o644)  # as release 0.2 made it

    def _write(self, path: Path, text: str, *, mode: int = 0o644) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def plant(self, path: str) -> Path:
        planted = Path(f"{self.root}{path}")
        self._write(planted, WORDS)
        return planted

    def does(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self.tree / "scripts" / script, "--root", self.root, *words]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd="/")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a file as the attacker, if the attacker can get it."""
    command = ["flock", path, "sh", "-c", "echo held; exec sleep 60"]
    with subprocess.Popen(
        list(map(str, command)), user=ATTACKER, group=ATTACKER, extra_groups=[], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None
            holder.stdout.readline()  # an empty line: the attacker could not open the file
            yield
        finally:
            holder.kill()


def rolls_back(machine: Machine) -> list[str]:
    """Plant another program's unit where the previous version has one. Return the failures of a rollback."""
    planted = machine.plant(UNIT)
    done = machine.does("install", "--rollback")
    broken = []
    if planted.read_text() != WORDS:
        broken.append("a rollback replaced a unit that was not Symphony's")
    elif done.returncode == 0 or f"{planted} is there, and is not Symphony's" not in done.stderr:
        broken.append(f"a rollback did not report the file of another program: {done.stderr.strip()}")
    if (machine.prefix / "current").readlink() != Path("7.2"):
        broken.append("the version that ran is gone")
    return broken


def is_locked_out(machine: Machine) -> list[str]:
    """Let another user try to hold the lock. Return a failure if this keeps `uninstall` out. A run of either script
    closes the lock to other users, even the lock that an earlier release made.
    """
    with held(machine.prefix / ".lock"):
        done = machine.does("uninstall")
    return [f"another user's lock: {done.stderr.strip()}"] if "another scripts/install" in done.stderr else []


def is_removed(machine: Machine) -> list[str]:
    """Uninstall with another program's unit in the way. Return a failure if that unit is removed."""
    planted = machine.plant(UNIT)
    done = machine.does("uninstall")
    if not planted.exists():
        return ["scripts/uninstall removed a unit that was not Symphony's"]
    return [] if done.returncode == 0 and not machine.prefix.exists() else [f"it is not gone: {done.stderr.strip()}"]


def main() -> int:
    asked = options(__doc__)
    broken = list[str]()
    for attack in (rolls_back, is_locked_out, is_removed):
        with tempfile.TemporaryDirectory(prefix="attack-") as directory:
            Path(directory).chmod(0o755)
            machine = Machine(Path(directory), asked.tree)
            if attack is is_locked_out:
                machine.does("install", "--rollback")
            broken += attack(machine)
    return verdict("files of other owners stay, and no other user holds the lock", broken)


if __name__ == "__main__":
    sys.exit(main())
