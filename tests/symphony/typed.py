"""Commands that a manual page shows, typed into one shell: lines of examples that begin with `$`.

The model is the tiny one, so its answers are not compared: `.\\" varies` stands above output that differs by model,
time and machine.
"""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symphony.manuals.manual_text import plain_line
from tests.symphony.launchers import end_launchers

ROOT = Path(__file__).resolve().parents[2]
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
    """A command of a page, with the output that the page shows."""

    typed: str
    shown: list[str] = field(default_factory=list)
    varies: bool = False

    @property
    def ends_itself(self) -> bool:
        return not self.typed.endswith("&")

    @property
    def statuses(self) -> set[int]:
        """Return the possible statuses; `wait` has the status of the program that it waited for."""
        return {0, 143, 137} if "wait" in self.typed else {0}


def commands(page: str) -> Iterator[Command]:
    """Yield the commands of all examples of a page, in order. Lines above the first `$` of an example are skipped."""
    for block in re.findall(r"^\.EX\n(.*?)^\.EE$", page, re.MULTILINE | re.DOTALL):
        command: Command | None = None
        ending = ""
        for source in block.splitlines():
            line = plain_line(source)
            if command is not None and ending:
                command.typed += f"\n{line}"
                ending = "" if line == ending else ending
            elif line.startswith("$ "):
                if command is not None:
                    yield command
                command = Command(line[2:])
                ending = "END" if "<<'END'" in line else ""
            elif command is None:
                continue
            elif source == '.\\" varies':
                command.varies = True
            else:
                command.shown.append(line)
        if command is not None:
            yield command


class Shell:
    """A bash in an empty home; its `symphony serve` has a small model and a mount here."""

    def __init__(self, home: Path, runtime: Path) -> None:
        self.home, self.mount, self._runtime = home, home / "kv", runtime
        self._write_symphony(home / "bin" / "symphony")
        environment = os.environ | {
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SYMPHONY_SOCKET": str(home / "s"),
            "XDG_RUNTIME_DIR": str(runtime),
        }
        typed, self._typing = os.pipe()
        self._errors = (home / "errors").open("w+")
        self.process: Any = subprocess.Popen(
            ["bash", "--norc", "-c", SHELL, "manual", str(typed)],
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
        serve = f'case $1 in serve) shift; set -- serve {options} "$@";; esac'
        path.write_text(f"#!/bin/sh\n{serve}\n{run}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def types(self, command: Command) -> tuple[list[str], int]:
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

    def check(self, command: Command) -> None:
        """Type a command, and compare its status and its output with the page."""
        shown, status = self.types(command)
        told = f"$ {command.typed}\n{shown}\n{self.errors()}"
        assert status in command.statuses, told
        if command.varies:
            assert shown, told
        else:
            assert shown == command.shown, told

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        os.close(self._typing)
        try:
            end_launchers(self._runtime)
        finally:
            os.killpg(self.process.pid, signal.SIGKILL)  # with a daemon that is left
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()
        for mount in re.findall(rf" ({re.escape(str(self.home))}/\S+) ", Path("/proc/mounts").read_text()):
            subprocess.run(["fusermount3", "-uzq", mount], check=False)
