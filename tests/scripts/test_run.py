"""scripts/run as a user meets it: the demonstration, Ctrl-C, a clean end (the tiny model's words are noise)."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed"
    ),
    pytest.mark.skipif(
        not (ROOT / ".venv/.symphony-installed").exists(), reason="scripts/test has not installed .venv: this would"
    ),
]


@pytest.fixture
def place(tmp_path):
    """Return the environment and the options of a daemon of the test's own."""
    environment = os.environ | {"SYMPHONY_SOCKET": str(tmp_path / "socket"), "TMPDIR": str(tmp_path)}
    options = ["--model", "tiny", "--kv-memory", "64M", "--mount", tmp_path / "kv", "--state", tmp_path / "state"]
    return environment, options


@pytest.mark.slow
def test_the_demonstration_forks_continues_and_removes_a_conversation(place, tmp_path):
    environment, options = place
    command = [ROOT / "scripts/run", "--once", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    typed = [line[2:] for line in done.stdout.splitlines() if line.startswith("$ ")]
    assert [command.split()[0] for command in typed] == [
        ".venv/bin/symphony", "ls", "cp", ".venv/bin/symphony", "ls", ".venv/bin/symphony", "df", "rm", "ls",
    ]  # fmt: skip
    assert "--resume" in typed[3]
    assert done.stdout.endswith(f"symphony: stopped; {tmp_path}/kv is unmounted\n")
    assert not os.path.ismount(tmp_path / "kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "state"]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, "what the first time left was still there: " + again.stdout + again.stderr


@pytest.mark.slow
def test_the_mount_stays_until_ctrl_c_and_then_goes_cleanly(place, tmp_path):
    environment, options = place
    with subprocess.Popen(
        [ROOT / "scripts/run", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as script:  # fmt: skip
        lines = iter(script.stdout.readline, "")
        stays = f"symphony: {tmp_path}/kv stays mounted; Ctrl-C ends the daemon and unmounts it\n"
        before = list(iter(lines.__next__, stays))
        assert os.path.ismount(tmp_path / "kv"), before
        assert [path.name for path in (tmp_path / "kv").iterdir()] == ["france.kv"]
        assert next(lines) == "symphony: now type in a second terminal:\n"
        typed = [next(lines).strip() for _ in range(5)]
        assert typed[1:3] == [f"export SYMPHONY_SOCKET={tmp_path}/socket", ".venv/bin/symphony run chat"]
        second = subprocess.run(
            [ROOT / "scripts/run", *options], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1
        assert "already runs" in second.stderr
        assert f"SYMPHONY_SOCKET={tmp_path}/symphony-second/symphony.sock scripts/run --mount" in second.stderr
        assert second.stdout == "", "nothing is installed before a daemon is looked for"
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        assert list(lines) == ["\n", f"symphony: stopped; {tmp_path}/kv is unmounted\n"]
    assert script.returncode == 0
    assert not os.path.ismount(tmp_path / "kv")


@pytest.mark.slow
def test_a_daemon_that_cannot_start_says_why_in_one_line(place, tmp_path):
    environment, _ = place
    options = ["--model", tmp_path / "nowhere", "--mount", tmp_path / "kv", "--state", tmp_path / "state"]
    command = [ROOT / "scripts/run", "--once", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}/nowhere" in done.stderr
    assert "doctor" in done.stderr


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path):
    """The user is not root and has no sudo: `id` and `sudo` are replaced, the look at the machine is real."""
    for name, text in (("id", "echo 1000"), ("sudo", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "gcc"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    (tmp_path / "python3").symlink_to(sys.executable)
    source = "set -euo pipefail; . scripts/lib.sh; install_packages python3"
    done = subprocess.run(
        ["bash", "-c", source], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "fuse3" in done.stderr
    assert "sudo apt-get install fuse3" in done.stderr


@pytest.mark.parametrize(("user", "named"), [(0, {"systemd-container", "debootstrap"}), (1000, set())])
def test_what_boots_a_debian_is_installed_for_the_tests_of_root(tmp_path, user, named):
    for name, text in (("id", f"echo {user}"), ("python3", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bash").symlink_to("/usr/bin/bash")
    source = "set -euo pipefail; . scripts/lib.sh; missing_packages python3 test"
    done = subprocess.run(
        ["bash", "-c", source], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert {"fuse3", "chromium"} <= set(done.stdout.split())
    assert set(done.stdout.split()) & {"systemd-container", "debootstrap"} == named


FAKE_PYTHON = """#!/bin/bash
case "$*" in
*setup.py*) touch compiles; sleep 60 & wait ;;
*--editable*) until [ -e compiles ]; do sleep 0.02; done; %s ;;
esac
"""
"""Stand-in for Python: its compilers take a minute, and hold the lock as long as they live; meanwhile pip runs."""


@pytest.mark.parametrize("meanwhile", ["exit 1", "kill -INT $PPID; exit 130", "kill -TERM $PPID; exit 143"])
def test_an_installation_that_ends_early_ends_its_compilers(tmp_path, meanwhile):
    """Compilers that stay would hold the next installation's lock for minutes, and write into its files."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "scripts/lib.sh").write_text((ROOT / "scripts/lib.sh").read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(FAKE_PYTHON % meanwhile)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path / "tmp")}
    source = "set -euo pipefail; . scripts/lib.sh; install_packages() { :; }; setup run"
    done = subprocess.run(
        ["bash", "-c", source], cwd=tmp_path, env=environment, capture_output=True, timeout=20, check=False
    )
    assert done.returncode != 0
    subprocess.run(["flock", "--timeout", "5", tmp_path / "scripts/lib.sh", "true"], check=True)
    assert not list((tmp_path / "tmp").glob("*/log"))


def test_the_wheels_of_a_boot_are_of_the_extras_that_the_installer_asks_for(tmp_path, monkeypatch):
    """A wheelhouse of other extras ends the installation: no matching distribution."""
    kept = runpy.run_path(str(ROOT / "scripts/boot/kept.py"))["Kept"](tmp_path / "work", tmp_path / "log")
    (tmp_path / "work/releases").mkdir(parents=True)
    (tmp_path / "work/releases/symphony_os-0.2.0-x.whl").touch()
    wheels = list[tuple[object, ...]]()
    monkeypatch.setattr(type(kept), "_pip", lambda _self, *words: wheels.append(words))
    kept._make_wheelhouse(tmp_path / "wheelhouse")
    installs = f"""
        . scripts/lib.sh
        eval "$(sed -n '/^make_environment()/,/^}}/p' scripts/install)"
        long() {{ shift; "$@"; }}
        install_with_pip() {{ printf '%s\\n' "$1"; }}
        install_model() {{ :; }}
        stage_files() {{ :; }}
        python=true new={tmp_path}/new wheelhouse=there wheel=symphony
        make_environment
    """
    asked = subprocess.run(["bash", "-c", installs], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = str(wheels[0][-1]).partition("[")[2]
    assert asked.split("[")[1].strip().replace(",gpu]", "]") == built
    assert built


def test_the_tests_install_compiles_only_what_changed_since_the_run_s(tmp_path):
    """`scripts/run` and then `scripts/test` install; a change of the sources is compiled again."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/lib.sh").write_text((ROOT / "scripts/lib.sh").read_text())
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/bash\necho "$*" >>asked\ncase "$*" in *setup.py*) touch built ;; esac\n')
    python.chmod(0o755)
    replaced = "install_packages() { :; }; extensions_are_built() { [ -e built ]; }; fingerprint() { echo $is; }"
    seen = []
    for sources, level in (("old", "run"), ("old", "test"), ("old", "run"), ("old", "test"), ("new", "test")):
        source = f"set -euo pipefail; . scripts/lib.sh; {replaced}; is={sources}; setup {level}"
        (tmp_path / "asked").write_text("")
        environment = os.environ | {"PYTHON": sys.executable}
        subprocess.run(["bash", "-c", source], cwd=tmp_path, env=environment, timeout=20, check=True)
        asked = (tmp_path / "asked").read_text()
        seen.append(("setup.py" in asked, ".[test]" in asked))
        assert (tmp_path / ".venv/.symphony-installed").read_text() in {f"{sources} {level}\n", "old test\n"}
    assert seen == [(True, False), (False, True), (False, False), (False, False), (True, True)]
