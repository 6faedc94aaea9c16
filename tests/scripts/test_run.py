"""scripts/run as a user meets it: the demonstration, Ctrl-C, a clean end; and what scripts/lib.sh installs."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed"
)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def lib(source, **how):
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, "check": False} | how
    command = ["bash", "-c", f"set -euo pipefail; . scripts/lib.sh; {source}"]
    return subprocess.run(command, **options)  # noqa: PLW1510 - it is in `options`


@pytest.fixture
def place(tmp_path):
    """Return the environment and the options of a daemon of the test's own."""
    environment = os.environ | {"SYMPHONY_SOCKET": str(tmp_path / "socket"), "TMPDIR": str(tmp_path)}
    options = ["--model", "tiny", "--kv-memory", "64M", "--mount", tmp_path / "kv", "--state", tmp_path / "state"]
    return environment, options


@pytest.fixture
def run(place):
    if lib('[[ "$(cat .venv/.symphony-installed)" == "$(fingerprint .venv/bin/python) "* ]]').returncode:
        pytest.skip("NO DEMONSTRATION: scripts/test has not installed .venv for these sources, and scripts/run would")

    def run(*options):
        command = [str(ROOT / "scripts/run"), *map(str, options)]
        return subprocess.run(command, env=place[0], capture_output=True, text=True, timeout=100, check=False)

    return run


@pytest.mark.slow
def test_the_demonstration_forks_continues_and_removes_a_conversation(run, place, tmp_path):
    done = run("--once", *place[1])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    typed = [line[2:] for line in done.stdout.splitlines() if line.startswith("$ ")]
    symphony = ".venv/bin/symphony"
    said = [command.split()[0] for command in typed]
    assert said == [symphony, "ls", "cp", symphony, "ls", symphony, "df", "rm", "ls"]
    assert "--resume" in typed[3]
    assert done.stdout.endswith(f"symphony: stopped; {tmp_path}/kv is unmounted\n")
    assert not os.path.ismount(tmp_path / "kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "state"]
    again = run("--once", *place[1])
    assert again.returncode == 0, "what the first time left was still there: " + again.stdout + again.stderr


@pytest.mark.slow
def test_the_mount_stays_until_ctrl_c_and_then_goes_cleanly(run, place, tmp_path):
    environment, options = place
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [ROOT / "scripts/run", *options]
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **out) as script:
        assert script.stdout is not None
        lines = iter(script.stdout.readline, "")
        stays = f"symphony: {tmp_path}/kv stays mounted; Ctrl-C ends the daemon and unmounts it\n"
        before = list(iter(lines.__next__, stays))
        assert os.path.ismount(tmp_path / "kv"), before
        assert [path.name for path in (tmp_path / "kv").iterdir()] == ["france.kv"]
        assert next(lines) == "symphony: now type in a second terminal:\n"
        typed = [next(lines).strip() for _ in range(5)]
        assert typed[1:3] == [f"export SYMPHONY_SOCKET={tmp_path}/socket", ".venv/bin/symphony run chat"]
        second = run(*options)
        assert second.returncode == 1
        assert "already runs" in second.stderr
        assert f"SYMPHONY_SOCKET={tmp_path}/symphony-second/symphony.sock scripts/run --mount" in second.stderr
        assert second.stdout == "", "nothing is installed before a daemon is looked for"
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        assert list(lines) == ["\n", f"symphony: stopped; {tmp_path}/kv is unmounted\n"]
    assert script.returncode == 0
    assert not os.path.ismount(tmp_path / "kv")


@pytest.mark.slow
def test_a_daemon_that_cannot_start_says_why_in_one_line(run, tmp_path):
    done = run("--once", "--model", tmp_path / "nowhere", "--mount", tmp_path / "kv", "--state", tmp_path / "state")
    assert done.returncode == 1
    assert f"{tmp_path}/nowhere" in done.stderr
    assert "doctor" in done.stderr


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path):
    """The user is not root and has no sudo: `id` and `sudo` are replaced, the look at the machine is real."""
    executable(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    executable(tmp_path / "sudo", "#!/bin/sh\nexit 1\n")
    for name, target in (("bash", "/usr/bin/bash"), ("gcc", "/usr/bin/gcc"), ("python3", sys.executable)):
        (tmp_path / name).symlink_to(target)
    done = lib("install_packages python3", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "fuse3" in done.stderr
    assert "sudo apt-get install fuse3" in done.stderr


@pytest.mark.parametrize(("user", "named"), [(0, {"systemd-container", "debootstrap"}), (1000, set())])
def test_what_boots_a_debian_is_installed_for_the_tests_of_root(tmp_path, user, named):
    executable(tmp_path / "id", f"#!/bin/sh\necho {user}\n")
    executable(tmp_path / "python3", "#!/bin/sh\nexit 0\n")
    (tmp_path / "bash").symlink_to("/usr/bin/bash")
    found = set(lib("missing_packages python3 test", env={"PATH": str(tmp_path)}, check=True).stdout.split())
    assert found >= {"fuse3", "chromium", "etcd-server"}
    assert found & {"systemd-container", "debootstrap"} == named


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A tree with scripts/lib.sh, and a Python of its own in .venv."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    executable(tmp_path / "scripts/lib.sh", (ROOT / "scripts/lib.sh").read_text())
    return tmp_path


FAKE_PYTHON = """#!/bin/bash
case "$*" in
*setup.py*) touch compiles; sleep 60 & wait ;;
*--editable*) until [ -e compiles ]; do sleep 0.02; done; %s ;;
esac
"""
"""Stand-in for Python: its compilers take a minute, and hold the lock as long as they live; meanwhile pip runs."""


@pytest.mark.parametrize("meanwhile", ["exit 1", "kill -INT $PPID; exit 130", "kill -TERM $PPID; exit 143"])
def test_an_installation_that_ends_early_ends_its_compilers(checkout, meanwhile):
    """Compilers that stay would hold the next installation's lock for minutes, and write into its files."""
    executable(checkout / ".venv/bin/python", FAKE_PYTHON % meanwhile)
    assert lib("install_packages() { :; }; setup run", cwd=checkout).returncode != 0
    subprocess.run(["flock", "--timeout", "5", checkout / "scripts/lib.sh", "true"], check=True)
    assert not list((checkout / "tmp").glob("*/log"))


def test_the_wheels_of_a_boot_are_of_the_extras_that_the_installer_asks_for(tmp_path, monkeypatch):
    """A wheelhouse of other extras ends the installation: no matching distribution."""
    kept = runpy.run_path(str(ROOT / "scripts/boot/kept.py"))["Kept"](tmp_path / "work", tmp_path / "log")
    (tmp_path / "work/releases").mkdir(parents=True)
    (tmp_path / "work/releases/symphony_os-0.2.0-x.whl").touch()
    wheels = list[tuple[object, ...]]()
    monkeypatch.setattr(type(kept), "_pip", lambda _self, *words: wheels.append(words))
    kept._make_wheelhouse(tmp_path / "wheelhouse")
    installs = f"""
        set +euo pipefail
        eval "$(sed -n '/^make_environment()/,/^}}/p' scripts/install)"
        long() {{ shift; "$@"; }}
        install_with_pip() {{ printf '%s\\n' "$1"; }}
        install_model() {{ :; }}
        stage_files() {{ :; }}
        python=true new={tmp_path}/new wheelhouse=there wheel=symphony
        make_environment
    """
    built = str(wheels[0][-1]).partition("[")[2]
    assert lib(installs, check=True).stdout.split("[")[1].strip().replace(",gpu]", "]") == built
    assert built


@pytest.mark.slow
def test_the_tests_install_compiles_only_what_changed_since_the_run_s(checkout):
    """`scripts/run` and then `scripts/test` install; a change of the sources is compiled again."""
    asked = checkout / "asked"
    python = '#!/bin/bash\necho "$*" >>asked\ncase "$*" in *setup.py*) touch built ;; esac\n'
    executable(checkout / ".venv/bin/python", python)
    replaced = "install_packages() { :; }; extensions_are_built() { [ -e built ]; }; fingerprint() { echo $is; }"
    seen = []
    for sources, level in (("old", "run"), ("old", "test"), ("old", "run"), ("old", "test"), ("new", "test")):
        asked.write_text("")
        lib(f"{replaced}; is={sources}; setup {level}", cwd=checkout, check=True)
        seen.append(("setup.py" in asked.read_text(), ".[test]" in asked.read_text()))
        assert (checkout / ".venv/.symphony-installed").read_text() in {f"{sources} {level}\n", "old test\n"}
    assert seen == [(True, False), (False, True), (False, False), (False, False), (True, True)]
