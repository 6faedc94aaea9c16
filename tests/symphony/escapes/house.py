"""A daemon of root's, users who run programs beside it, and the results of the programs' attempts to get out."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from symphony.launcher.machine.processes import children, descendants
from tests.symphony.daemons import Daemon
from tests.symphony.escapes.outside import Outside, as_user
from tests.symphony.launchers import end_launchers, eventually

PROGRAMS = Path(__file__).parent / "programs"
ATTACKER = PROGRAMS / "attacker.py"
ROOT = Path(__file__).resolve().parents[3]
STANDARD, NONE = "standard", "none"
NEEDED = ("numpy", "numpy.libs", "cffi", "trio", "outcome", "sniffio", "attr", "attrs", "sortedcontainers", "idna")
"""Packages that Symphony needs of those that are installed."""


def table() -> list[dict[str, Any]]:
    """Return all attacks: their names, what they try, and why some have no control."""
    done = subprocess.run([sys.executable, ATTACKER, "--list"], check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


class NoPython(Exception):
    """A user can't run Symphony here."""


class User:
    """A user, with a directory, a launcher and an outside of its own."""

    def __init__(self, daemon: Daemon, directory: Path, runtime: Path, uid: int) -> None:
        self.daemon = daemon
        self.uid = uid
        self.runtime = runtime
        self.work = directory / "work"
        """Directory in which the user's programs are started."""
        directory.mkdir()
        directory.chmod(0o755)
        for path in (self.work, runtime):
            path.mkdir(mode=0o755 if path == self.work else 0o700)
            os.chown(path, uid, uid)
        self.outside = Outside(directory / "outside", uid, runtime)
        self._symphony = [python_of(uid, directory), "-m", "symphony"]
        self.environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(self.outside.home),
            "USER": "user",
            "XDG_RUNTIME_DIR": str(runtime),
            "SYMPHONY_SOCKET": str(daemon.socket),
            "PYTHONPATH": str(ROOT),
            "CANARY": self.outside.canary,
        }

    def symphony(self, *words: object, check: bool = True, **how: Any) -> subprocess.CompletedProcess[str]:
        how = {"stdin": subprocess.DEVNULL, "cwd": self.work, "env": self.environment, **as_user(self.uid), **how}
        command = [*self._symphony, *map(str, words)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, **how)
        assert not check or done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done

    def run(self, isolation: str, *words: object, check: bool = True, **how: Any) -> subprocess.CompletedProcess[str]:
        """`symphony run` with so much isolation."""
        return self.symphony("run", "--isolation", isolation, *words, check=check, **how)

    def descendants(self) -> set[int]:
        """Return all processes below the zygote of the user's launcher."""
        return set(descendants(children(self.zygote)))

    def script(self, source: str, name: str = "prog.py") -> Path:
        """A program given as text, in a directory of its own; it has libsym as `sym`."""
        where = Path(tempfile.mkdtemp(prefix="program-", dir=self.work.parent))
        where.chmod(0o755)
        path = where / name
        path.write_text(f"import json, os, signal, sys, time\nimport libsym as sym\n{source}")
        return path

    def says(
        self, isolation: str, source: str, *args: object, options: Sequence[object] = (), cwd: Path | None = None
    ) -> Any:
        """Run a program given as text, and return its last line of output, parsed as JSON."""
        done = self.run(isolation, *options, self.script(source), *args, cwd=cwd or self.work)
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def tries(self, isolation: str, *names: str, options: Sequence[object] = ()) -> dict[str, dict[str, Any]]:
        """Try these attacks, and return each one's outcome."""
        done = self.run(isolation, *options, ATTACKER, json.dumps(self.world), *names, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found = {row["attack"]: row for row in rows}
        assert set(found) == set(names), (done.returncode, done.stdout, done.stderr)
        return found

    @property
    def launcher(self) -> Path:
        """The directory of its launcher, started if it was not."""
        if not list(self.runtime.glob("symphony/*/control")):
            self.symphony("run", "--isolation", NONE, self.script(""))
        return next(self.runtime.glob("symphony/*/control")).parent

    @property
    def zygote(self) -> int:
        pid = int((self.launcher / "lock").read_text())
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    @property
    def world(self) -> dict[str, Any]:
        """Facts for attackers; another program of the user runs meanwhile."""
        if "other_socket" not in self.outside.world:
            self._start_another()
        return self.outside.world | {
            "daemon": str(self.daemon.socket),
            "launcher": str(self.launcher),
            "namespaces": {each.name: os.readlink(each) for each in Path("/proc/self/ns").iterdir()},
        }

    def _start_another(self) -> None:
        other = self.script("print(os.environ['SYMPHONY_SOCKET'], flush=True)\nsym.kv_create()\ntime.sleep(3600)")
        self.symphony("run", "--isolation", NONE, "-d", "--name", "another", other)
        where = eventually(self.symphony("logs", "another").stdout.strip)
        self.outside.world["other_socket"] = where

    def clean_up(self) -> None:
        end_launchers(self.runtime)
        self.outside.close()


class House:
    """The daemon and its users, made when they are asked for."""

    def __init__(self, directory: Path, runtime: Path) -> None:
        self.directory = directory
        self.daemon = Daemon(directory, "--model", "tiny", "--kv-memory", "64M")
        self._runtime = runtime
        self.users: dict[int, User] = {}

    def user(self, uid: int) -> User:
        if uid not in self.users:
            self.users[uid] = User(self.daemon, self.directory / f"user-{uid}", self._runtime / str(uid), uid)
        return self.users[uid]


@contextmanager
def opened_house(directory: Path) -> Iterator[House]:
    """Serves until the block ends; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="se") as runtime:
        for path in (Path(runtime), directory):
            path.chmod(0o755)
        house = House(directory, Path(runtime))
        try:
            yield house
            assert house.daemon.stop() == 0, house.daemon.log.read_text()
            assert "Traceback" not in house.daemon.log.read_text()
        finally:
            for user in house.users.values():
                user.clean_up()
            house.daemon.clean_up()


def python_of(uid: int, directory: Path) -> str:
    """An interpreter that a user may run: this one, else one of the system's with what Symphony needs of packages.

    Raises NoPython where there is neither.
    """
    if _works_for(uid, sys.executable):
        return sys.executable
    environment = directory / "python"
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(system).exists():
        raise NoPython(f"uid {uid} may not run {sys.executable}, and there is no {system}")
    subprocess.run([system, "-m", "venv", "--without-pip", environment], check=True)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    for name in NEEDED:
        where = Path(sysconfig.get_path("purelib")) / name
        if where.exists():
            shutil.copytree(where, packages / name)
    for where in Path(sysconfig.get_path("purelib")).glob("_cffi_backend*"):
        shutil.copy(where, packages)
    python = str(environment / "bin/python")
    if not _works_for(uid, python):
        raise NoPython(f"uid {uid} can run neither {sys.executable} nor Symphony by {system}")
    return python


def _works_for(uid: int, python: str) -> bool:
    how = {"env": {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}, "cwd": "/", "capture_output": True, **as_user(uid)}
    try:
        return subprocess.run([python, "-m", "symphony", "run", "--list"], check=False, **how).returncode == 0
    except PermissionError:
        return False
