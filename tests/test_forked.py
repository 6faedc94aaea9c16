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
    "a buffer": (["-c", "file = open(1, 'w', closefd=False); file.write('kept'); import sys; sys.exit('why')"], {}),
    "a thread": (["-c", "import threading; threading.Timer(0.1, print, ['late']).start()"], {}),
    "a handler": (["-c", "import atexit; atexit.register(print, 'left'); raise ValueError"], {}),
    "a full disk": (["-c", "import sys; sys.stdout = open('/dev/full', 'w'); print(1)"], {}),
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


SCRIPT = """
import os, subprocess, sys, tempfile
from pathlib import Path

FILES = ['cmdline', 'environ']
SHOWN = f"import os; print(os.getppid(), os.nice(0), *(open('/proc/self/' + each).read() for each in {FILES}))"

def tell(*words):
    done = subprocess.run([sys.executable, *words], env=os.environ | {"A": "b"}, capture_output=True, text=True)
    print(done.returncode, done.stdout.replace(str(os.getpid()), "us"), done.stderr)

print(sys.argv, sys.path, __name__, __file__, tempfile.gettempdir())
exec(SHOWN)
tell("-c", SHOWN)
os.nice(1)
tell("-c", SHOWN)
tell("-m", "symphony", "--version")
raise ValueError(Path.cwd())
"""


def test_a_forked_script_and_its_processes_see_and_show_what_new_ones_do(tmp_path):
    """The last of them has a parent that has changed what it inherits."""
    (tmp_path / "script.py").write_text(SCRIPT)
    how = {"env": {**os.environ, "TMPDIR": str(tmp_path)}, "cwd": tmp_path}
    of_fork, of_new = both([str(tmp_path / "script.py"), "a"], **how)
    assert of_fork == of_new
    assert of_new[0] == 1
    assert of_new[1].count("A=b") == 2


def test_processes_of_a_forked_script_are_forked(tmp_path):
    """A child that is forked has what nobody has imported in it."""
    program = "import sys; print('symphony.daemon.daemon' in sys.modules)"
    lines = "import subprocess, sys", f"subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    (tmp_path / "script.py").write_text("\n".join(lines))
    of_fork, of_new = both([str(tmp_path / "script.py")])
    assert (of_fork[1], of_new[1]) == ("True\n", "False\n")
