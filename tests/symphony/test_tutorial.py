"""The tutorial of symphony(7): all that it says is typed in one shell, with a daemon of its own, and has to show it.

The model is the tiny one, so what a model says is not looked at: `.\\" varies` stands above what differs by model, time
and machine.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from symphony.manual_text import plain_line
from tests.symphony.launchers import end_launchers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "man" / "symphony.7"
MARK = "-- typed 5f3759df"
SHELL = f"""
while IFS= read -r -d '' typed <&$1; do
    eval "$typed"
    printf '%s %d\\n' '{MARK}' "$?"
done
"""
"""Reads commands from a descriptor of their own: standard input is the programs'."""


@dataclass(slots=True)
class Command:
    """What is typed at one prompt, and what is then shown."""

    typed: str
    shown: list[str] = field(default_factory=list)
    varies: bool = False

    @property
    def ends_itself(self) -> bool:
        return not self.typed.endswith("&")

    @property
    def statuses(self) -> set[int]:
        """`wait` has that of what it waited for."""
        return {0, 143, 137} if "wait" in self.typed else {0}


def commands(page: str) -> Iterator[Command]:
    """Of all examples of the tutorial, in order."""
    tutorial = page.partition("\n.SH A TUTORIAL\n")[2]
    for block in re.findall(r"^\.EX\n(.*?)^\.EE$", tutorial, re.MULTILINE | re.DOTALL):
        command = None
        ending = ""
        for source in block.splitlines():
            line = plain_line(source)
            if ending:
                command.typed += f"\n{line}"
                ending = "" if line == ending else ending
            elif source == '.\\" varies':
                command.varies = True
            elif line.startswith("$ "):
                if command is not None:
                    yield command
                command = Command(line[2:])
                ending = "END" if "<<'END'" in line else ""
            else:
                command.shown.append(line)
        yield command


class Shell:
    """One bash for the whole tutorial, in an empty home; its `symphony serve` has a small model and a mount here."""

    def __init__(self, home: Path, runtime: Path) -> None:
        self.home, self.mount, self._runtime = home, home / "kv", runtime
        self._write_symphony(home / "bin" / "symphony")
        environment = os.environ | {
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SYMPHONY_SOCKET": str(home / "s"),
            "XDG_RUNTIME_DIR": str(runtime),
        }
        typed, self._typing = os.pipe()
        self._errors = (home / "errors").open("w+")
        self.process = subprocess.Popen(
            ["bash", "--norc", "-c", SHELL, "tutorial", str(typed)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",  # of a tiny model's words
            env=environment,
            cwd=home,
            pass_fds=[typed],
            start_new_session=True,
        )
        os.close(typed)

    def _write_symphony(self, path: Path) -> None:
        options = f"--model tiny --kv-memory 64M --mount {self.mount} --state {self.home / 'state'}"
        run = f'exec {sys.executable} -P -m symphony "$@"'
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\n[ "$1" != serve ] || set -- "$@" {options}\n{run}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def types(self, command: Command) -> tuple[list[str], int]:
        """What it shows, and its status."""
        os.write(self._typing, command.typed.replace("/kv", str(self.mount)).encode() + b"\0")
        lines, status = list[str](), None
        while status is None or (not command.ends_itself and len(lines) < len(command.shown)):
            line = self.process.stdout.readline()
            assert line, f"the shell has ended: {self.errors()}"
            before, mark, number = line.partition(MARK)
            if mark:
                status = int(number)
            if before or not mark:
                lines.append(before.rstrip("\n").replace(str(self.mount), "/kv"))
        return lines, status

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        os.close(self._typing)
        end_launchers(self._runtime)
        os.killpg(self.process.pid, signal.SIGKILL)  # with a daemon that is left
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()
        if f" {self.mount} " in Path("/proc/mounts").read_text():
            subprocess.run(["fusermount3", "-uzq", self.mount], check=False)


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
        shown, status = shell.types(command)
        told = f"$ {command.typed}\n{shown}\n{shell.errors()}"
        assert status in command.statuses, told
        if command.varies:
            assert shown, told
        else:
            assert shown == command.shown, told
    assert "Traceback" not in (shell.home / "tutorial" / "daemon.log").read_text()
    assert not os.path.ismount(shell.mount)
    assert not (shell.home / "s").exists()
