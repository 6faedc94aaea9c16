"""The units of scripts/systemd: systemd finds nothing wrong with them, and the daemon's leaves it hardly any rights."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "scripts" / "systemd"
MOST_EXPOSED = 2.5
NAMESPACED = re.compile(
    r"^(Private(Tmp|Devices|Mounts|Users|IPC)|Protect(System|Home|Kernel\w+|ControlGroups|Proc|Hostname)|ProcSubset"
    r"|ReadWritePaths|ReadOnlyPaths|InaccessiblePaths|BindPaths|TemporaryFileSystem|Root\w+|MountFlags)=",
    re.MULTILINE,
)
"""Settings that give a unit a mount namespace of its own."""

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="UNITS NOT VERIFIED: apt-get install systemd"
)


@pytest.fixture
def units(tmp_path):
    """Copies, whose commands and users this machine has; instances in place of templates."""
    for path in UNITS.rglob("symphony*"):
        if path.suffix in (".service", ".socket"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r"(?<==)/(usr/local/bin/symphony|opt/symphony/current/bin/python)\b", "/bin/true", text)
            text = re.sub(r"^((?:Socket)?(?:User|Group))=.*", r"\1=root", text, flags=re.MULTILINE)
            directory = tmp_path / path.parent.relative_to(UNITS)
            directory.mkdir(exist_ok=True)
            (directory / path.name).write_text(text)
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("manager", ["system", "user"])
def test_systemd_verifies_every_unit(units, manager, monkeypatch):
    directory = units if manager == "system" else units / "user"
    names = [path.name.replace("@.", "@one.") for path in sorted(directory.iterdir()) if path.is_file()]
    assert len(names) >= 3
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", f"{directory}:")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(units))
    command = ["systemd-analyze", f"--{manager}", "--man=no", "--recursive-errors=no", "verify", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=directory)
    ours = [line for line in done.stderr.splitlines() if "symphony" in line]
    assert (ours, done.returncode) == ([], 0), done.stderr


@needs_systemd
@pytest.mark.parametrize("name", ["symphony.service", "symphony@.service"])
def test_the_daemon_is_hardly_exposed(units, name):
    unit = units / name
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={int(MOST_EXPOSED * 10)}", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    overall = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout
    (level,) = re.findall(r": (\d+\.\d)", overall)
    assert float(level) < MOST_EXPOSED


@pytest.mark.parametrize("path", [*UNITS.glob("symphony-mount*.service"), *UNITS.glob("user/*.service")], ids=str)
def test_what_mounts_for_others_has_no_mount_namespace(path):
    """A unit with a namespace of its own looks healthy, but nobody else sees its mount."""
    assert NAMESPACED.findall(path.read_text(encoding="utf-8")) == []


def test_a_template_differs_from_its_unit_by_its_instance_alone():
    """So what is learnt of one holds for the other."""
    for name in ("symphony.service", "symphony.socket", "symphony-mount.service", "symphony-mount.socket"):
        stem, _, suffix = name.partition(".")
        of_one = (UNITS / f"{stem}@.{suffix}").read_text(encoding="utf-8").splitlines()
        known = [line.strip("# ") for line in (UNITS / name).read_text(encoding="utf-8").splitlines()]
        for line in of_one[1:]:
            named = line.strip("# ").replace("@%i.", ".").replace(" (%i)", "")
            for before in ("symphony/%i.", "mount/%i.", "-%i"):
                named = named.replace(before, before.replace("%i", "symphony") if "/" in before else "")
            assert named in known, f"{stem}@.{suffix}: {line}"
