"""Programs that are killed somewhere inside their calls leave nothing behind: the short form of the bench."""

import json
import os
import subprocess
import sys

import pytest

from symphony.launcher.spec import ISOLATIONS
from tests.symphony.launchers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_that_are_killed_in_their_calls_leave_nothing_and_change_nobodys_output(isolation):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    command = [sys.executable, ROOT / "scripts/bench/kills.py", "--kills", "30", "--frees", "3"]
    done = subprocess.run([*command, "--isolation", isolation], check=True, capture_output=True, timeout=100)
    found = json.loads(done.stdout)["kill -9 in calls"]
    assert (found["what stays"], found["rounds that differ"], found["doctor"]) == ({}, 0, "clean")
    assert found["rounds beside"] > 0
