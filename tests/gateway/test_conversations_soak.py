"""A short run of `scripts/soak/conversations.py`: several parties hold conversations at once, across restarts."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conversations_of_several_parties_hold_what_each_was_sent(pytestconfig):
    script = pytestconfig.rootpath / "scripts/soak/conversations.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(
        r"(\d+) operations, (\d+) restarts in \d+ s, seed 0: all conversations hold what .*\n", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) >= 120
    assert int(found[2]) >= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_turns_that_take_no_lock_end_the_run(pytestconfig):
    """The soak is judged by mutants: one of them is found in short."""
    script = pytestconfig.rootpath / "scripts/soak/conversation_mutants.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found after" in done.stdout
