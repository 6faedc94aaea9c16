"""Forks in place of new processes: a program sees the same."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tests import forked

SEEN = """
import os, signal, sys
print(sys.argv, __name__, os.getcwd(), sys.path, sys.stdin.read(), sys.stdout.line_buffering)
print(dict(os.environ), os.getppid(), os.getpgid(0), os.getsid(0), os.umask(0), signal.pthread_sigmask(0, []))
print([signal.getsignal(each) for each in signal.valid_signals()], sorted(os.listdir("/proc/self/fd")))
print("error", file=sys.stderr)
"""
OTHERS = {name: value for name, value in os.environ.items() if name != "PATH"} | {"MORE": "1"}
WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "words": (["-c", SEEN, "a", "-b"], {}),
    "an environment": (["-c", SEEN], {"env": OTHERS, "cwd": "/", "input": "text"}),
    "a PYTHONPATH": (["-c", SEEN], {"env": {**os.environ, "PYTHONPATH": "/nowhere"}}),
    "a session": (["-c", "import os; print(os.getsid(0) == os.getpid())"], {"start_new_session": True}),
    "a status": (["-c", "raise SystemExit(7)"], {}),
    "a signal": (["-c", "import os; os.kill(os.getpid(), 9)"], {}),
    "Ctrl-C": (["-c", "import os; os.kill(os.getpid(), 2)"], {}),
    "a command": (["-m", "symphony", "--version"], {}),
    "what a command lacks": (["-m", "symphony", "stat", "--moon"], {}),
    "other words": (["-m", "platform"], {}),
}


def both(words, **how):
    """Return the status, the output and the last line of errors: of a fork, and of a new process."""
    how = {"timeout": 60, "text": True, "env": {**os.environ}, **how}
    how |= {} if "input" in how else {"stdin": subprocess.DEVNULL}
    command = [sys.executable, *words]
    for done in (forked.run(command, **how), subprocess.run(command, **how, check=False, capture_output=True)):
        yield done.returncode, done.stdout, done.stderr.splitlines()[-1:]


@pytest.mark.parametrize(("words", "how"), WAYS.values(), ids=WAYS)
def test_a_fork_sees_and_says_what_a_new_process_does(words, how):
    of_fork, of_new = both(words, **how)
    assert of_fork == of_new


def test_a_fork_has_the_descriptors_that_it_is_given_by_their_numbers(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        [*both(["-c", f"import os; os.write({file.fileno()}, b'there ')"], pass_fds=[file.fileno()])]
    assert (tmp_path / "file").read_text() == "there there "
