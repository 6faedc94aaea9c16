"""The screen of `symphony top --fleet`: programs and machines of a fleet."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeAlias

from rich.text import Text
from textual.widgets import Static

import libsym as sym
from symphony.launcher.asking.listing import printable
from symphony.views.rates import human_count
from symphony.views.reports import counted
from symphony.views.top.app import Tables
from symphony.views.top.columns import MachineRow, ProgramRow, machine_columns
from symphony.views.top.lines import row_of
from symphony.views.top.listing import Listing
from symphony.views.top.sampling import Done, Gone

_SYMPHONY = (sys.executable, "-P", "-m", "symphony.cli")
AGAIN_S = 2.0
"""Pause after the end of the process that prints samples."""
KILL_S = 60.0
"""Time in which a machine must take a signal for a program."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """State of a fleet at one moment."""

    taken_s: float
    """Time of the sample, by `time.monotonic()`."""
    fleet: str
    here: str
    """Machine of the daemon that was asked."""
    troubles: tuple[str, ...]
    machines: tuple[MachineRow, ...]
    programs: tuple[ProgramRow, ...]

    @classmethod
    def from_line(cls, line: bytes) -> FleetSample:
        found = json.loads(line)
        machines = tuple(_machine_row(name, each) for name, each in found["machines"].items())
        programs = tuple(map(row_of, found["programs"]))
        return cls(time.monotonic(), found["fleet"], found["machine"], tuple(found["troubles"]), machines, programs)


def _machine_row(name: str, facts: Mapping[str, Any]) -> MachineRow:
    rates = facts["rates"] or {}
    return MachineRow(
        id=name,
        state=": ".join(each for each in (facts["state"], facts["trouble"]) if each),
        model=facts["model"],
        num_programs=facts["num_programs"],
        tokens_per_s=rates.get("tokens_per_s"),
        busy=rates.get("busy"),
        load=facts["load"],
        free_bytes=facts["free_bytes"],
    )


News: TypeAlias = "FleetSample | Gone | Done"


class FleetSampling(threading.Thread):
    """Thread that reads the samples of `symphony top --fleet --json`, and passes them to `tell`."""

    def __init__(self, socket: Path | None, interval_s: float, tell: Callable[[News], None]) -> None:
        super().__init__(name="sampling", daemon=True)
        self._socket = () if socket is None else ("--socket", str(socket))
        self._interval_s = interval_s
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._here = ""
        self._over = threading.Event()

    @property
    def interval_s(self) -> float:
        return self._interval_s

    @interval_s.setter
    def interval_s(self, seconds: float) -> None:
        """Change the interval. Another process prints samples from now on."""
        self._interval_s = seconds
        self._end_process()

    def stop(self) -> None:
        self._over.set()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def run(self) -> None:
        while not self._over.is_set():
            interval_s = self._interval_s
            why = self._read(interval_s)
            if interval_s == self._interval_s and not self._over.is_set():
                self._tell(Gone(why))
                self._over.wait(AGAIN_S)

    def _read(self, interval_s: float) -> str:
        """Pass on samples until the process ends. Return its last line of errors."""
        words = [*_SYMPHONY, "top", "--fleet", "--json", "--interval", str(interval_s), *self._socket]
        with (
            TemporaryFile("w+", errors="replace") as errors,
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as printing,
        ):
            self._process = printing
            assert printing.stdout is not None
            for line in printing.stdout:
                sample = FleetSample.from_line(line)
                self._here = sample.here
                self._tell(sample)
            printing.wait()
            errors.seek(0)
            return _last_line(errors.read()) or f"symphony top --json has ended with {printing.returncode}"

    def ask(self, action: Callable[[FleetSampling], str]) -> None:
        """Carry out an action in a thread of its own: the other machine may not answer."""
        threading.Thread(target=lambda: self._tell(self._done(action)), daemon=True).start()

    def _done(self, action: Callable[[FleetSampling], str]) -> Done:
        try:
            return Done(action(self))
        except subprocess.CalledProcessError as error:
            return Done(_last_line(error.stderr), failed=True)
        except subprocess.TimeoutExpired:
            return Done("the machine does not answer", failed=True)

    def kill(self, program: sym.ProgramInfo, number: int, name: str) -> str:
        """Send a signal to a program, as `symphony kill` does."""
        who = program.id.removeprefix(f"{self._here}:")
        words = [*_SYMPHONY, "kill", "--signal", str(number), *self._socket, "--", who]
        subprocess.run(words, check=True, capture_output=True, text=True, errors="replace", timeout=KILL_S)
        return f"{name} was sent to {program.name}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("symphony: ") if lines else ""


class FleetTop(Tables):
    """The app: tables of the programs on all machines, and of the machines."""

    CSS = Tables.CSS + "#fleet { height: 1; padding: 0 1; }"

    def __init__(self, socket: Path | None, interval_s: float) -> None:
        self._line = Static(id="fleet", markup=False)
        machines = Listing[MachineRow]("machines", machine_columns(), "MACHINE", id="machines")
        super().__init__(FleetSampling(socket, interval_s, self.tell), self._line, machines)

    def show(self, sample: FleetSample) -> None:
        tokens_per_s = sum(each.tokens_per_s or 0.0 for each in sample.machines)
        counts = f"{counted(len(sample.programs), 'program')} on {counted(len(sample.machines), 'machine')}"
        text = f"fleet {sample.fleet}, seen from {sample.here}: {counts}, {human_count(tokens_per_s)} tokens/s"
        self._line.update(Text(printable(text), no_wrap=True, overflow="ellipsis"))
        self._say(printable("; ".join(sample.troubles)))
        self._programs.show(sample.programs)
        self._second.show(sample.machines)

    def clear(self) -> None:
        self._line.update("")
