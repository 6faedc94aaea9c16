"""Programs that are killed somewhere inside their calls leave nothing behind: the short form of the bench."""

import os
import subprocess
import sys

import pytest

from symphony.launcher.common.spec import ISOLATIONS
from tests.symphony.launchers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_that_are_killed_in_their_calls_leave_nothing_and_change_nobodys_output(isolation):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    command = [sys.executable, ROOT / "scripts/bench/launches.py", "--quick", "--only", "kills"]
    done = subprocess.run(
        [*command, "--isolation", isolation], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "30 killed in their calls" in done.stdout
    assert "nothing stays" in done.stdout
