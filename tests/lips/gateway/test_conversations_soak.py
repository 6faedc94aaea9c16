"""A short run of `scripts/soak/conversations.py`: several parties hold conversations at once, across restarts."""

import re
import sys

import pytest

from tests import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_conversations_of_several_parties_hold_what_each_was_sent(pytestconfig):
    command = [sys.executable, pytestconfig.rootpath / "scripts/soak/conversations.py", "--quick"]
    done = forked.run(command, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(
        r"(\d+) operations, (\d+) restarts in \d+ s, seed 0: all conversations hold what .*\n", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) >= 60
    assert int(found[2]) >= 1
