"""Test whether this user can have sandboxes on this machine: make a sandbox, without a program in it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from symphony.launcher.sandbox.enter import Outside, clone, ends, enter
from symphony.launcher.sandbox.lacks import Lacks

_INSIDE = 7
"""Exit status of the probe's process if it was confined."""


def probe() -> str | None:
    """Try to make a sandbox, and return the error. None: the sandbox was made."""
    user = os.getuid(), os.getgid()
    with tempfile.TemporaryDirectory() as directory:
        said, say = os.pipe2(os.O_CLOEXEC)
        why, tell = os.pipe2(os.O_CLOEXEC)
        Path(directory, "socket").touch()
        try:
            pid, orders = clone(0, said, say)
        except Lacks as error:
            return str(error)
        if pid == 0:
            os.dup2(tell, 3)
            os._exit(_come_inside(directory, Outside(orders, *user)))
        os.close(say)
        os.close(tell)
        os.waitpid(pid, 0)
        status = ends(os.read(said, 100)).get(0)
        text = os.read(why, 4096).decode()
        os.close(said)
        os.close(why)
    if status is not None and os.waitstatus_to_exitcode(status) == _INSIDE:
        return None
    return text or "no sandbox: its first process is ended"


def _come_inside(directory: str, outside: Outside) -> int:
    nothing: dict[str, object] = {key: [] for key in ("shows", "empty", "hidden", "allow_net")}
    places = {"mount": None, "home": None, "socket": f"{directory}/socket", "base": directory}
    try:
        enter({**nothing, **places, "own_bytes": 1 << 20, "tasks": 1024}, outside)
    except Lacks as error:
        os.write(3, str(error).encode())
        return 1
    return _INSIDE


def main() -> None:
    """Test for `symphony doctor`. If no sandbox can be made, print why, and exit with status 1."""
    hindrance = probe()
    if hindrance is not None:
        print(hindrance, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
