"""A short run of `scripts/soak/conversations.py`: several parties hold conversations at once, across restarts."""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def said(pytestconfig):
    """The words of a script's short run, which has to end well."""

    def run(name):
        command = [sys.executable, pytestconfig.rootpath / "scripts/soak" / name, "--quick"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_conversations_of_several_parties_hold_what_each_was_sent(said):
    text = said("conversations.py")
    found = re.fullmatch(r"(\d+) operations, (\d+) restarts in \d+ s, seed 0: all conversations hold what .*\n", text)
    assert found, text
    assert int(found[1]) >= 120
    assert int(found[2]) >= 1


def test_turns_that_take_no_lock_end_the_run(said):
    """The soak is judged by mutants: one of them is found in short."""
    assert "found after" in said("conversation_mutants.py")
