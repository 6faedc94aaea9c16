"""A million malformed frames against a daemon, while the region changes under its hands: scripts/fuzz/frames.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fuzz/frames.py"


@pytest.mark.slow
@pytest.mark.timeout(300)  # a million frames take most of a minute alone
def test_a_million_malformed_frames_neither_end_the_daemon_nor_show_what_is_anothers():
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    command = [sys.executable, SCRIPT, "--frames", "1000000", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["broken"] == []
    assert done.returncode == 0
    assert found["dropped"] > 50, "the ring was broken, too"
