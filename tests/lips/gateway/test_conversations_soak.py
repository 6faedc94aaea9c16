"""A short run of `scripts/soak/conversations.py`: several parties hold conversations at once, across restarts."""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def said_by(root, name):
    """The words of a script's short run, which has to end well."""
    command = [sys.executable, root / "scripts/soak" / name, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_conversations_of_several_parties_hold_what_each_was_sent(pytestconfig):
    text = said_by(pytestconfig.rootpath, "conversations.py")
    found = re.fullmatch(r"(\d+) operations, (\d+) restarts in \d+ s, seed 0: all conversations hold what .*\n", text)
    assert found, text
    assert int(found[1]) >= 60
    assert int(found[2]) >= 1


def test_turns_that_take_no_lock_end_the_run(pytestconfig):
    """The soak is judged by mutants: one of them is found in short."""
    assert "found after" in said_by(pytestconfig.rootpath, "conversation_mutants.py")
