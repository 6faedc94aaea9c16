"""The tutorial, symphony-tutorial(7): a test types all of its commands into one shell, with a daemon of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.symphony.typed import ROOT, Shell, commands

PAGE = ROOT / "man" / "symphony-tutorial.7"


@pytest.fixture
def shell(tmp_path):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("THE TUTORIAL WAS NOT TYPED: /dev/fuse is missing or not open to this user")
    with tempfile.TemporaryDirectory(prefix="sl") as runtime:
        shell = Shell(tmp_path, Path(runtime))
        try:
            yield shell
        finally:
            shell.end()


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight seconds, where nothing else computes
def test_all_that_it_says_can_be_typed_and_shows_what_it_shows(shell):
    typed = list(commands(PAGE.read_text(encoding="utf-8")))
    assert len(typed) > 30
    for command in typed:
        shell.check(command)
    assert "Traceback" not in (shell.home / "tutorial" / "daemon.log").read_text()
    assert not os.path.ismount(shell.mount)
    assert not (shell.home / "s").exists()
