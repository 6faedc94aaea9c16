"""scripts/install and scripts/uninstall, below a directory: no user, unit or package of this machine is touched.

The wheel is made of the tree as it lies here, without compiling (tests/test_packaging.py does that), and brings what it
needs from the environment of the tests. What takes systemd is shown by scripts/boot.
"""

import io
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.durable.index import FORMAT_VERSION
from kvfs.durable.state import State
from symphony.checks.installed import PACKAGES
from symphony.settings.described import shipped_file

ROOT = Path(__file__).resolve().parents[2]
SITE = sysconfig.get_paths()["purelib"]
SERVICE = ("scripts/lib.sh", "scripts/service.sh", "scripts/install", "scripts/uninstall", "symphony/__init__.py")

pytestmark = pytest.mark.timeout(600)


class Release:
    """A checkout of a version, as far as an installation from wheels needs it, and the directory of its wheel."""

    def __init__(self, directory: Path, version: str) -> None:
        self.checkout = directory / f"checkout-{version}"
        self.wheels = directory / f"wheels-{version}"
        self.version = version
        for name in SERVICE:
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        for folder in ("man", "scripts/systemd"):
            shutil.copytree(ROOT / folder, self.checkout / folder)
        module = self.checkout / "symphony/__init__.py"
        module.write_text(re.sub('__version__ = ".*"', f'__version__ = "{version}"', module.read_text()))
        self.wheels.mkdir()
        self._make_wheel(module.read_text())

    def _make_wheel(self, module: str) -> None:
        about = f"symphony_os-{self.version}.dist-info"
        metadata = ("Metadata-Version: 2.1", "Name: symphony-os", f"Version: {self.version}", "Provides-Extra: server")
        described = (ROOT / "symphony/settings/described.py").read_text()
        texts = {
            "symphony/__init__.py": module,
            "symphony/settings/described.py": described.replace("daemon:", f"daemon of {self.version}:"),
            "others.pth": f"{SITE}\n",
            f"{about}/METADATA": "\n".join((*metadata, "")),
            f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{about}/entry_points.txt": "[console_scripts]\nsymphony = symphony.cli:main\n",
            f"{about}/RECORD": "",
        }
        data = f"symphony_os-{self.version}.data/data/share/man"
        with zipfile.ZipFile(self.wheels / f"symphony_os-{self.version}-py3-none-any.whl", "w") as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
            for page in (self.checkout / "man").glob("*.[1-8]"):
                archive.write(page, f"{data}/man{page.suffix[1:]}/{page.name}")
            for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.*")]:
                name = str(path.relative_to(ROOT))
                if path.suffix in (".py", ".so") and name not in texts:
                    archive.write(path, name)

    def install(self, root: Path, *options: object) -> list[object]:
        return [self.checkout / "scripts/install", "--root", root, "--wheelhouse", self.wheels, *options]


PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
{sys.executable} -m venv --without-pip "$3"
ln -s {SITE}/pip {SITE}/pip-*.dist-info "$3"/lib/python3*/site-packages/
"""
"""A Python whose environments have this one's pip. To unpack pip into each would take a third of the time."""


@pytest.fixture(autouse=True)
def python(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("python") / "python3"
    path.write_text(PYTHON)
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(path))


def run(*words: object, status: int = 0, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own["PIP_COMPILE"] = "0"  # compiling all modules of each version would take half of the time
    done = subprocess.run(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd="/",
        env=own | environment,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def everything_below(root: Path, *but: str) -> set[str]:
    """Files and links, and directories that are empty: those of the machine itself stay."""
    found = {path for path in root.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())}
    names = {str(path.relative_to(root)) for path in found}
    return {name for name in names if not name.startswith(but)}


@pytest.fixture
def old(tmp_path):
    return Release(tmp_path, "7.1")


@pytest.fixture
def new(tmp_path):
    return Release(tmp_path, "7.2")


def interrupted(release: Release, root: Path) -> None:
    """An installation that is killed in the middle of it."""
    with subprocess.Popen(
        list(map(str, release.install(root))), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as script:  # fmt: skip
        assert isinstance(script.stdout, io.BufferedReader)
        while b"making" not in script.stdout.read1():
            assert script.poll() is None
        os.killpg(script.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_life_of_an_installation(old, new, tmp_path):  # noqa: PLR0915 - a life
    root = tmp_path / "machine"
    prefix, command = root / "opt/symphony", root / "usr/local/bin/symphony"
    configuration, state = root / "etc/symphony/symphony.toml", root / "var/lib/symphony"

    command.parent.mkdir(parents=True)
    command.touch()
    assert f"{command} is there, and is not Symphony's" in run(*old.install(root), status=1)
    command.unlink()

    interrupted(old, root)
    assert (prefix / "7.1/stamp").read_text() == "unfinished\n"
    assert not command.is_symlink()

    said = run(*old.install(root))
    assert re.search(r"^symphony: symphony 7.1 is installed in .*: \d+ s$", said, re.MULTILINE)
    assert run(command, "--version") == "symphony 7.1\n"
    assert configuration.read_text() == shipped_file().replace("daemon:", "daemon of 7.1:")
    assert (root / "usr/local/share/man/man1/symphony.1").read_text() == (ROOT / "man/symphony.1").read_text()
    units = {path.name for path in (root / "usr/local/lib/systemd/system").iterdir()}
    assert units == {path.name for path in (ROOT / "scripts/systemd").glob("*.[s][eo][rc]*")}
    for completion in ("bash-completion/completions/symphony", "zsh/site-functions/_symphony"):
        assert "symphony" in (root / "usr/local/share" / completion).read_text()

    before = os.lstat(prefix / "current").st_ino, os.lstat(prefix / "7.1").st_ino
    assert "symphony 7.1 was installed already, and is complete" in run(*old.install(root))
    assert (os.lstat(prefix / "current").st_ino, os.lstat(prefix / "7.1").st_ino) == before

    elsewhere = ("--prefix", "/srv/symphony")
    said = run(*new.install(root, *elsewhere), status=1)
    assert "Symphony is installed in /opt/symphony, not in /srv/symphony" in said

    # A configuration that the new version does not take stops an upgrade; one that was changed stays.
    (new.checkout / "scripts/systemd/symphony-run@.service").unlink()
    configuration.write_text('model = "tiny"\nmodle = "tiny"\n')
    said = run(*new.install(root), status=1)
    assert f"symphony 7.2 does not take {configuration}: mend it" in said
    assert f"{configuration}:2: unknown key 'modle'" in said
    assert run(command, "--version") == "symphony 7.1\n"
    configuration.write_text('model = "tiny"\n')
    (prefix / "6.0").mkdir()
    (prefix / "6.0/stamp").touch()
    said = run(*new.install(root))
    assert f"{configuration} was changed here, and stays; the one of 7.2 is {configuration}.new" in said
    assert re.search(r"^symphony: symphony 7.1 is 7.2 now: \d+ s$", said, re.MULTILINE)
    assert run(command, "--version") == "symphony 7.2\n"
    assert configuration.read_text() == 'model = "tiny"\n'
    assert not (root / "usr/local/lib/systemd/system/symphony-run@.service").exists()
    assert sorted(path.name for path in prefix.iterdir() if path.is_dir() and not path.is_symlink()) == ["7.1", "7.2"]

    # Back, unless the old version can't read the state.
    state.mkdir(parents=True)
    State(state).close()
    with closing(sqlite3.connect(state / "index.db")) as database:
        database.execute(f"PRAGMA user_version={FORMAT_VERSION + 1}")
    said = run(new.checkout / "scripts/install", "--root", root, "--rollback", status=1)
    assert f"is of format {FORMAT_VERSION + 1}, and this release knows formats up to {FORMAT_VERSION}" in said
    assert "7.1 can't read the state that 7.2 keeps" in said
    assert run(command, "--version") == "symphony 7.2\n"
    with closing(sqlite3.connect(state / "index.db")) as database:
        database.execute(f"PRAGMA user_version={FORMAT_VERSION}")
    assert "7.1 runs instead of 7.2" in run(new.checkout / "scripts/install", "--root", root, "--rollback")
    assert run(command, "--version") == "symphony 7.1\n"
    assert (root / "usr/local/lib/systemd/system/symphony-run@.service").exists()

    uninstall = [new.checkout / "scripts/uninstall", "--root", root]
    assert "is installed in /opt/symphony" in run(*uninstall, *elsewhere, "--purge", status=1)
    (prefix / "files.list").unlink()  # as an installation leaves it that ends before it is written
    command.with_name("symphony.installing").touch()
    for other in ("orchestra/score", "two/index.db", "gateway/gateway.key"):
        (root / f"var/lib/symphony-{other}").parent.mkdir()
        (root / f"var/lib/symphony-{other}").touch()
    assert "its state stays in" in run(*uninstall)
    assert everything_below(root, "var/lib/symphony") == {"etc/symphony/symphony.toml", "opt", "usr/local"}
    State(state).close()
    assert "nothing is installed in" in run(*uninstall)
    run(*uninstall, "--purge")
    assert everything_below(root) == {"etc", "opt", "usr/local", "var/lib/symphony-orchestra/score"}
    assert not state.exists()
    assert not configuration.parent.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--wheelhouse", "/nowhere"], "symphony: /nowhere is no directory of wheels"),
        (["--wheelhouse", "{empty}"], "symphony: {empty} has 0 wheels of symphony-os "),
        (["--prefix", "opt"], "symphony: opt is no absolute path"),
        (["--prefix", "/opt/my symphony"], "symphony: /opt/my symphony: a prefix and a root have letters, digits and"),
        (["--prefix", "/"], "symphony: Symphony takes a directory of its own: --prefix /opt/symphony"),
        (["--prefix"], "symphony: --prefix needs a directory"),
        (["--upgrade"], "symphony: unknown option --upgrade: see scripts/install --help"),
        (["--rollback"], "symphony: there is no version before any to go back to"),
    ],
)
def test_what_can_t_be_done_is_told_and_changes_nothing(tmp_path, options, told):
    root, empty = tmp_path / "machine", tmp_path / "empty"
    empty.mkdir()
    words = [word.format(empty=empty) for word in options]
    said = run(ROOT / "scripts/install", "--root", root, *words, status=1)
    assert said.startswith(told.format(empty=empty))
    assert everything_below(root) <= {"opt/symphony/.lock"}


def test_an_old_python_and_one_who_is_not_root_are_told_so(tmp_path):
    for name, text in (
        ("python3", '[ "$1" = --version ] && echo Python 3.9.2 && exit\n[ "$1" = -VV ] || exit 1\n'),
        ("id", "echo 1000\n"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    install = ROOT / "scripts/install"
    said = run(install, "--root", tmp_path / "machine", status=1, PYTHON=str(tmp_path / "python3"))
    needed = "Python 3.11 or newer is needed (PYTHON=/path/to/python3 chooses another)"
    assert said == f"symphony: Python 3.9.2 is too old: {needed}\n"
    said = run(install, status=1, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert said.startswith("symphony: this installs a service of the machine: start it as root\n")


def test_two_installations_at_once_are_one_too_many(tmp_path):
    prefix = tmp_path / "machine/opt/symphony"
    prefix.mkdir(parents=True)
    holder = ["flock", prefix / ".lock", ROOT / "scripts/install", "--root", tmp_path / "machine"]
    assert "another scripts/install or scripts/uninstall is at work on /opt/symphony" in run(*holder, status=1)
