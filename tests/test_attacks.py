"""Attacks of other users and of keys, in their short form: each promise holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ATTACKS = [
    "shared_names",
]

pytestmark = [
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="NO ATTACK TRIED: needs root, to be several users"),
]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails(name):
    command = [sys.executable, ROOT / f"scripts/attacks/{name}.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("held: ")


def test_every_attack_is_tried():
    assert {path.stem for path in (ROOT / "scripts/attacks").glob("*.py")} == {"attacked", *ATTACKS}
