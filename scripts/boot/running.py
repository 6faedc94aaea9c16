"""Run Symphony's service in a test machine: commands as its administrator and as its users."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import HANGS_S, Failed, Machine

INSIDE = Path(__file__).parent / "inside"
PYTHON = "/opt/symphony/current/bin/python"
INSTALL = "/root/symphony/scripts/install --wheelhouse /srv/wheelhouse"
UNINSTALL = "/root/symphony/scripts/uninstall"
CONFIG = "/etc/symphony/symphony.toml"
FILES_BEFORE = "/srv/before"
OTHERS = (
    *("/home", "/root", "/tmp", "/var/tmp", "/var/log", "/var/cache", "/srv"),
    *("/var/lib/systemd", "/var/lib/man-db", "/opt/symphony-0.1.0"),
)
FILES = f"find / -xdev {' '.join(f'-path {each} -prune -o' for each in OTHERS)} -print | LC_ALL=C sort"
"""Command that lists all files which an installation may change."""
TINY = 'model = "tiny"\nkv_memory = "256M"\n'
"""Configuration of all scenarios except the installation. They test the service, not the model."""


class Service:
    """symphony.service, its users alice and bob, and their programs."""

    def __init__(self, machine: Machine, *, is_short: bool) -> None:
        """`is_short`: scenarios do each thing once."""
        self.machine, self.is_short = machine, is_short
        self.run = machine.run
        self.num_loads = 0

    def prepare(self) -> None:
        self.run("for user in alice bob; do useradd --create-home --shell /bin/bash $user; done")
        # Sandboxes write limits of user namespaces to /proc/sys. Nspawn mounts it read-only, to protect the host.
        self.run("mount --options remount,bind,rw /proc/sys")
        shutil.copytree(INSIDE, self.machine.root / "srv/programs")
        self.run(f"chmod -R a+rX /srv/programs; {FILES} >{FILES_BEFORE}")

    def show(self, unit: str, key: str) -> str:
        return self.run(f"systemctl show --value --property={key} {unit}")

    def journal_of(self, unit: str, since_s: float) -> str:
        return self.run(f"journalctl --quiet --output=cat --since=@{since_s:.3f} --unit={unit}")

    def pid(self) -> int:
        return int(self.show("symphony.service", "MainPID"))

    def stat(self, user: str = "root") -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.run("symphony stat --json", user=user))
        return said

    def write(self, path: str, text: str) -> None:
        (self.machine.root / path.lstrip("/")).write_text(text)

    def configure(self, text: str) -> None:
        """Replace the configuration file."""
        self.write(CONFIG, text)

    def drop_in(self, text: str, unit: str = "symphony.service") -> None:
        """Write an administrator's drop-in for a unit. An empty `text` removes the drop-in."""
        directory = self.machine.root / f"etc/systemd/system/{unit}.d"
        if text:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "boot.conf").write_text(text)
        else:
            shutil.rmtree(directory)
        self.run("systemctl daemon-reload")

    def wait_for(self, condition: str, *, user: str = "root") -> None:
        """Wait until a bash command succeeds.

        The command is polled, because the machine sends no events to the host.
        """
        self.run(f"until {condition}; do sleep 0.05; done", user=user)

    @contextmanager
    def load(self, python: str = PYTHON, user: str = "alice") -> Iterator[Load]:
        """Start a user's program that makes and syncs files all the time. The program lives on while the daemon
        restarts.
        """
        self.num_loads += 1
        load = Load(self, python, user, f"load{self.num_loads}")
        try:
            load.more(4)
            yield load
        finally:
            load.stop()

    def expect(self, held: object, otherwise: str) -> None:
        if not held:
            raise Failed(otherwise)


class Load:
    """Program that makes files, with the log of its synced files."""

    def __init__(self, service: Service, python: str, user: str, name: str) -> None:
        service.run(f"install --directory --owner={user} /kv/{name} && sync /kv/{name}")
        self._service = service
        self.user = user
        self.log = f"/home/{user}/{name}.log"
        script = f"exec {python} /srv/programs/load.py {name} {self.log} 2>>{self.log}.errors"
        service.run(f": >{self.log}", user=user)
        self._process = service.machine.start(script, user=user)

    def more(self, count: int) -> None:
        """Wait until the program has synced `count` more files."""
        self._service.wait_for(f'[ "$(wc -l <{self.log})" -ge {self.count() + count} ]')

    def count(self) -> int:
        return int(self._service.run(f"wc -l <{self.log}"))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._service.run(f"pkill --exact --uid {self.user} --full '.*python /srv/programs/load.py .*{self.log}'")
            try:
                self._process.wait(HANGS_S)
            except subprocess.TimeoutExpired:
                raise Failed(f"{self.log}: its program does not end") from None

    def check(self, python: str = PYTHON) -> str:
        """Return the report of check.py on the load's files."""
        return self._service.run(f"{python} /srv/programs/check.py {self.log}", user=self.user)
