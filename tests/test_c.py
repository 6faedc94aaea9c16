"""The C without Python, under sanitizers. The long form of scripts/sanitize has every kernel, and takes minutes."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["memory", "threads"])
def test_the_channel_the_samplers_the_loop_and_the_step_survive_sanitizers(what):
    command = [SCRIPTS / "sanitize", "--short", what]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
