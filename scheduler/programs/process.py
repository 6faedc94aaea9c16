"""Processes as /proc tells of them: a number is given out again, the number with its start time is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STATE, _START = 0, 19
"""Fields of /proc/PID/stat behind the name."""


class ProcessState(NamedTuple):
    """Of a process that is there."""

    start: int
    """In clock ticks since the machine started."""
    has_ended: bool
    """Nobody has waited for it yet."""


def process_state(pid: int) -> ProcessState | None:
    """None: there is no such process, or it cannot be seen from here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return ProcessState(int(fields[_START]), fields[_STATE] in b"ZXx")
    except (OSError, IndexError, ValueError):
        return None


def is_alive(pid: int, start: int) -> bool:
    """Whether this very process still runs."""
    state = process_state(pid)
    return state is not None and state.start == start and not state.has_ended


def command_of(pid: int) -> str:
    """The name of a process's program, as `ps` shows it; nothing when it has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def uids_of(pid: int) -> tuple[int, ...]:
    """The uids that a process has: real, effective, saved. None when it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ()
    found = [line.split()[1:4] for line in status.splitlines() if line.startswith("Uid:")]
    return tuple(map(int, found[0])) if found else ()
