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


def boots(command, timeout_s, status):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@needs_root
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO BOOT TESTED: /dev/fuse is missing")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="NO BOOT TESTED: .venv is not of Debian 12's Python, 3.11")
@pytest.mark.slow
@pytest.mark.timeout(960)  # a Debian root and wheels are made first, once
def test_the_service_is_installed_is_ready_is_killed_and_goes():
    said = boots([sys.executable, "scripts/boot/boot.py", "--quick", "--limit", "14"], 900, 0)
    assert re.findall(r"^ok (\S+) \(\d+\.\d s\)$", said, re.MULTILINE) == ["install", "ready", "killed", "uninstall"]
    kills = re.search(r"^    (\d+) kills, (\d+) restarts; ", said, re.MULTILINE)
    assert kills is not None
    assert kills[1] == kills[2] != "0"
    lost = re.findall(r"(\d+) files synced, (\d+) lost", said)
    assert [int(files) > 15 and int(missing) == 0 for files, missing in lost] == [True, True], said
    assert "model SmolLM2-135M-Instruct" in said
    assert said.splitlines()[-1].startswith("all held ")


@needs_root
@pytest.mark.parametrize(
    ("which", "held", "failed"), [("some", ["ok holds", "FAILED breaks", "ok holds"], "breaks"), ("none", [], "needed")]
)
def test_a_scenario_that_fails_is_named_and_ends_the_boot_with_1(tmp_path, which, held, failed):
    """The others go on, unless they need it; the machine is stopped and its root removed."""
    said = boots([sys.executable, "-c", FAILING, str(tmp_path), which], 60, 1)
    told = re.findall(r"^((?:ok|FAILED) \S+) \(", said, re.MULTILINE)
    assert told == (held or ["FAILED needed"])
    assert re.search(rf"^stopped\nremoved\nfailed: {failed} ", said, re.MULTILINE)
    assert "    symphony.service: Failed at step EXEC" in said
