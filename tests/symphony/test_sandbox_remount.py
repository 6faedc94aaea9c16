"""A daemon that is started again, and programs in sandboxes that had its mount."""

import os
import subprocess
from typing import Any

import pytest

from tests.symphony.launchers import PIPES, SYMPHONY
from tests.symphony.sandboxes import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.skipif(os.getuid() != 0, reason="NO REMOUNT TESTED: only root mounts")]
LOOKS = """
import os, sys
kv = sys.argv[1]
def tried(what, *words):
    try:
        return what(*words)
    except OSError as error:
        return error.strerror
for line in sys.stdin:
    print(os.path.ismount(kv), tried(os.makedirs, f"{kv}/home/{line.strip()}"), flush=True)
"""


@pytest.fixture
def shared_parent(tmp_path):
    """A mount above the daemon's, which tells other namespaces of what is mounted below."""
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "--make-shared", tmp_path], check=True)
        yield
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.usefixtures("shared_parent")
def test_a_mount_comes_back_where_its_parent_is_shared(tmp_path_factory, start_daemon):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "64M")
    program = tmp_path_factory.mktemp("program") / "looks.py"
    program.write_text(LOOKS)
    how: dict[str, Any] = {"env": daemon.environment, "cwd": program.parent, **PIPES, "stderr": None}
    run: Any = subprocess.Popen([*SYMPHONY, "run", program, daemon.mount], **how)

    def look(name: str) -> str:
        print(name, file=run.stdin, flush=True)
        return run.stdout.readline().strip()

    with run:
        try:
            assert look("first") == "True None"
            assert daemon.stop() == 0
            gone = look("between")
            start_daemon("--model", "tiny", "--kv-memory", "64M")
            back = _once_it_changes(gone, look)
        finally:
            run.kill()
    assert (gone, back) == ("False None", "True None")


def _once_it_changes(before: str, look) -> str:
    """The first process of the sandbox is told of mounts by the kernel, and mounts what has come a moment later."""
    for attempt in range(1000):
        if (found := look(f"again-{attempt}")) != before:
            return found
    return before
