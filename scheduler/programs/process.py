"""Processes in /proc. The kernel reuses process numbers, but never with the same start time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STATE, _START = 0, 19
"""Indexes of two fields of /proc/PID/stat, counted from the field after the name."""


class ProcessState(NamedTuple):
    """State of a process that /proc shows."""

    start: int
    """Start time, in clock ticks since the machine booted."""
    has_ended: bool
    """Whether the process is a zombie: it has ended, and its parent has not waited for it."""


def process_state(pid: int) -> ProcessState | None:
    """Read a process's state. None: no such process exists, or the daemon cannot see it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return ProcessState(int(fields[_START]), fields[_STATE] in b"ZXx")
    except (OSError, IndexError, ValueError):
        return None


def is_alive(pid: int, start: int) -> bool:
    """Return whether the process with this number and start time still runs."""
    state = process_state(pid)
    return state is not None and state.start == start and not state.has_ended


def command_of(pid: int) -> str:
    """Return the name of a process's program, as `ps` shows it. An empty name: the process has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def uids_of(pid: int) -> tuple[int, ...]:
    """Return the real, effective and saved uid of a process. Empty: the process has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ()
    found = [line.split()[1:4] for line in status.splitlines() if line.startswith("Uid:")]
    return tuple(map(int, found[0])) if found else ()
