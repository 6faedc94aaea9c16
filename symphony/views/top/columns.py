"""The columns of both tables: their texts, sort keys and widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import libsym as sym
from symphony.launcher.asking.listing import printable, user_name
from symphony.views.rates import human_count, human_time
from symphony.views.reports import human_bytes

Row = TypeVar("Row")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """Column of a table."""

    name: str
    width: int
    text: Callable[[Row], str]
    key: Callable[[Row], Any]
    is_text: bool = False
    """Text is sorted from a to z and aligned left. Numbers are sorted from the largest down and aligned right."""
    grows: int = 0
    """Weight of the column when spare width is distributed. 0: its width never grows."""
    from_width: int = 0
    """Smallest width of the table at which the column is shown."""


PADDING = 1
"""Blanks on each side of a cell."""


def fitting(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Return the columns that a table of this width shows, with the spare width distributed among them."""
    shown = [each for each in columns if width >= each.from_width]
    left = max(0, width - sum(each.width + 2 * PADDING for each in shown))
    parts = sum(each.grows for each in shown)
    return [replace(each, width=each.width + left * each.grows // parts) if parts else each for each in shown]


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """Program with its latest rates."""

    program: sym.ProgramInfo
    isolation: str
    """Kind of isolation. Empty: the program is another user's, or connected by itself."""
    tokens_per_s: float
    waiting: float
    """Average number of calls that waited: 1 means that one call waited all the time."""

    @property
    def id(self) -> str:
        return self.program.id

    @property
    def words(self) -> str:
        """Text that a filter searches."""
        program = self.program
        return (
            f"{program.name} {program.id} {program.pid} {user_name(program.uid)} {state_of(program)} {self.isolation}"
        )


@dataclass(frozen=True, slots=True)
class FileRow:
    """File that is in use."""

    file: sym.HotFile

    @property
    def id(self) -> str:
        return self.file.path

    @property
    def words(self) -> str:
        return f"{self.file.path} {user_name(self.file.uid)} {'pinned' if self.file.pinned else ''}"


@dataclass(frozen=True, slots=True)
class MachineRow:
    """Machine of a fleet."""

    id: str
    """Name of the machine."""
    state: str
    model: str
    num_programs: int
    tokens_per_s: float | None
    """None: the machine has not told it."""
    busy: float | None
    """Share of the time in which steps were computed. None: the machine has not told it."""
    load: Mapping[str, int] | None
    """Load by etcd's record. None: the machine is not listed."""
    free_bytes: int | None

    @property
    def words(self) -> str:
        return f"{self.id} {self.state} {self.model}"


def state_of(program: sym.ProgramInfo) -> str:
    """Return the state of a program, and the call in which it waits: `waiting for a lock (kv_lock)`."""
    if program.pid is None:
        return "starting"
    return f"{program.state} ({program.call})" if program.call else program.state


def short_id(program: sym.ProgramInfo) -> str:
    """Return the id of a program on its machine. In a fleet, the machine's name stands before it."""
    return program.id.rpartition(":")[2]


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%" if part >= 0.005 else "-"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def program_columns() -> list[Column[ProgramRow]]:
    """Return the columns of the table of programs, from left to right."""

    def of(name: str, width: int, text: Callable[[sym.ProgramInfo], str], key: Any, **how: Any) -> Column[ProgramRow]:
        return Column(name, width, lambda row: text(row.program), lambda row: key(row.program), **how)

    def rate(row: ProgramRow) -> float:
        return row.tokens_per_s

    return [
        of("NAME", 13, lambda each: each.name, lambda each: each.name, is_text=True, grows=1),
        of("USER", 7, lambda each: user_name(each.uid), lambda each: user_name(each.uid), is_text=True),
        of("PID", 7, lambda each: str(each.pid or "-"), lambda each: each.pid or 0, from_width=90),
        of("STATE", 13, state_of, state_of, is_text=True, grows=3),
        Column(
            "ISOL",
            5,
            lambda row: _SHORT.get(row.isolation, row.isolation) or "-",
            lambda row: row.isolation,
            is_text=True,
        ),
        of("TOKENS", 7, lambda each: human_count(each.usage.tokens), lambda each: each.usage.tokens),
        Column("TOK/S", 6, lambda row: human_count(row.tokens_per_s) if row.tokens_per_s else "-", rate),
        of("PAGES", 6, lambda each: human_count(each.pages), lambda each: each.pages),
        Column("WAIT", 5, lambda row: _percent(row.waiting), lambda row: row.waiting),
        of("CALLS", 6, lambda each: human_count(each.usage.calls), lambda each: each.usage.calls, from_width=100),
        of("FAILED", 7, lambda each: human_count(each.usage.failed_calls), _failed, from_width=110),
        of("CONNS", 6, lambda each: str(each.connections), lambda each: each.connections, from_width=120),
        of("ID", 8, short_id, short_id, is_text=True, from_width=132),
    ]


_SHORT = {"standard": "std"}


def _failed(program: sym.ProgramInfo) -> int:
    return program.usage.failed_calls


def file_columns(page_bytes: int) -> list[Column[FileRow]]:
    """Return the columns of the table of files, from left to right."""

    def of(name: str, width: int, text: Callable[[sym.HotFile], str], key: Any, **how: Any) -> Column[FileRow]:
        return Column(name, width, lambda row: text(row.file), lambda row: key(row.file), **how)

    def own(file: sym.HotFile) -> int:
        return file.exclusive_pages * (file.page_bytes or page_bytes)

    def shared(file: sym.HotFile) -> int:
        return (file.pages - file.exclusive_pages) * (file.page_bytes or page_bytes)

    return [
        of("PATH", 13, lambda each: each.path, lambda each: each.path, is_text=True, grows=1),
        of("HEAT", 5, lambda each: _percent(each.heat), lambda each: each.heat),
        of("HITS", 5, lambda each: human_count(each.hits), lambda each: each.hits),
        of("USED", 5, lambda each: _age(each.idle_s), lambda each: -each.idle_s),
        of("SIZE", 6, lambda each: human_bytes(each.size), lambda each: each.size),
        of("OWN", 6, lambda each: human_bytes(own(each)), own),
        of("SHARED", 7, lambda each: human_bytes(shared(each)), shared),
        of("OPEN", 5, lambda each: str(each.opens), lambda each: each.opens),
        of("PIN", 4, lambda each: "pin" if each.pinned else "", lambda each: each.pinned),
        of("TOKENS", 7, lambda each: human_count(each.tokens), lambda each: each.tokens, from_width=90),
        of("USER", 8, lambda each: user_name(each.uid), lambda each: user_name(each.uid), is_text=True, from_width=100),
    ]


def machine_columns() -> list[Column[MachineRow]]:
    """Return the columns of the table of machines, from left to right."""

    def load(name: str) -> Callable[[MachineRow], int]:
        return lambda row: -1 if row.load is None else row.load[name]

    def time_of(name: str) -> Callable[[MachineRow], str]:
        return lambda row: human_time(None if row.load is None else row.load[name] * 1e-6)

    return [
        Column("MACHINE", 10, lambda row: row.id, lambda row: row.id, is_text=True, grows=1),
        Column("STATE", 14, lambda row: row.state, lambda row: row.state, is_text=True, grows=4),
        Column("PROGRAMS", 8, lambda row: str(row.num_programs), lambda row: row.num_programs),
        Column("TOK/S", 6, lambda row: _told(row.tokens_per_s, human_count), lambda row: row.tokens_per_s or 0),
        Column("BUSY", 4, lambda row: _told(row.busy, _percent), lambda row: row.busy or 0),
        Column("CALLS", 5, lambda row: "-" if row.load is None else str(row.load["calls"]), load("calls")),
        Column("STEP", 7, time_of("step_us"), load("step_us"), from_width=90),
        Column("BACKLOG", 7, time_of("backlog_us"), load("backlog_us"), from_width=100),
        Column("FREE", 5, lambda row: _told(row.free_bytes, human_bytes), lambda row: row.free_bytes or 0),
        Column("MODEL", 12, lambda row: row.model or "-", lambda row: row.model, is_text=True, from_width=120),
    ]


def _told(number: Number | None, text: Callable[[Number], str]) -> str:
    return "-" if number is None else text(number)


def cell(text: str) -> str:
    """Return text as one line without control characters. Other users choose names, and could forge what is shown."""
    return printable(text)
