"""The service on a Debian that boots, in the short form of scripts/boot: installed, ready, killed, and away again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import sys
from pathlib import Path

sys.path.insert(0, "scripts/boot")
import boot
from machine import Failed

class Kept:
    def __init__(self, *_, thin): pass
    def make(self, *, previous): return []
    def root(self, name): return Path(name)
    def remove(self, name): print("removed")

class Machine:
    root = Path(sys.argv[1])
    def __init__(self, *_): pass
    def boot(self): pass
    def run(self, *_, **__): return ""
    def journal(self, since_s): return "symphony.service: Failed at step EXEC"
    def stop(self): print("stopped")

def holds(s): return "measured"
def breaks(s): raise Failed("$ systemctl restart symphony.service ended with 1, not 0")
def needed(s): breaks(s)

boot.Kept, boot.Machine = Kept, Machine
boot.SHORT, boot.ALWAYS = {"some": (holds, breaks, holds), "none": (needed, holds)}[sys.argv[2]], (needed,)
(Path(sys.argv[1]) / "srv").mkdir()
sys.argv = ["boot.py", "--quick", "--work", sys.argv[1]]
sys.exit(boot.main())
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO BOOT TESTED: only root may boot a machine")


@needs_root
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO BOOT TESTED: /dev/fuse is missing")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="NO BOOT TESTED: .venv is not of Debian 12's Python, 3.11")
@pytest.mark.slow
@pytest.mark.timeout(960)  # a Debian root and wheels are made first, once
def test_the_service_is_installed_is_ready_is_killed_and_goes():
    command = [sys.executable, ROOT / "scripts/boot/boot.py", "--quick", "--limit", "14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    held = re.findall(r"^ok (\S+) \(\d+\.\d s\)$", done.stdout, re.MULTILINE)
    assert held == ["install", "ready", "killed", "uninstall"]
    assert "    3 kills, 3 restarts; " in done.stdout
    lost = re.findall(r"(\d+) files synced, (\d+) lost", done.stdout)
    assert [int(files) > 15 and int(missing) == 0 for files, missing in lost] == [True, True], done.stdout
    assert "model SmolLM2-135M-Instruct" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all held ")


@needs_root
@pytest.mark.parametrize(
    ("which", "said"), [("some", ["ok holds", "FAILED breaks", "ok holds"]), ("none", ["FAILED needed"])]
)
def test_a_scenario_that_fails_is_named_and_ends_the_boot_with_1(tmp_path, which, said):
    """The others go on, unless they need it; the machine is stopped and its root removed."""
    command = [sys.executable, "-c", FAILING, tmp_path, which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert re.findall(r"^((?:ok|FAILED) \S+) \(", done.stdout, re.MULTILINE) == said
    failed = said[-1 if which == "none" else 1].partition(" ")[2]
    assert re.search(rf"^stopped\nremoved\nfailed: {failed} ", done.stdout, re.MULTILINE)
    assert "    symphony.service: Failed at step EXEC" in done.stdout
