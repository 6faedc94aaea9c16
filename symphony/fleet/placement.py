"""The choice of a machine for a program: a function of a table, without a clock or state, so that it can be replayed.

The choice minimises the delay that the program would see on a machine, in seconds:

    delay = AGAIN * entries that are not there * time of an entry + backlog + TYPICAL_STEPS * time of a step
            + bytes that memory lacks / EVICT_BYTES_S

The first part is what the longest prefix that is there saves, the others are the load. So a program runs where its
pages are until the load there costs more than the pages would. The next program then finds the pages in two places.

Several daemons choose from the same table, a few seconds old. If all of them chose the best machine, it would be the
worst one before its record says so. So a seed draws one of the machines that are nearly as good as the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TYPICAL_STEPS = 256
"""Steps that a program is expected to compute. A generation of an agent has a few hundred tokens."""
TYPICAL_ROWS = 512
"""Rows that a program is expected to compute before its first step, beside its files."""
LINK_BYTES_S = 500e6
"""Rate at which a daemon fetches pages of a peer: 560 to 622 MB/s over loopback with TLS (scripts/bench/fleet.py)."""
AGAIN = 2.0
"""Weight of the time for entries that are not there, because this work also delays other programs. Among 1, 2, 4 and 8,
2 gives the least time to the first token, on 100 machines with a load of 0.3 and of 0.6 (scripts/bench/placement.py).
"""
EVICT_BYTES_S = 200e6
"""Rate at which memory is made free. Pages of other files go to disk, at about 1 GB/s, and are read again later."""
NEARLY = 0.02
"""Part of the least delay by which another machine may be worse, and still be drawn."""

TABLE = np.dtype(
    [
        ("can", np.bool_),
        ("held", np.int64),
        ("free_bytes", np.int64),
        ("step_s", np.float64),
        ("row_s", np.float64),
        ("backlog_s", np.float64),
        ("placed", np.int64),
    ]
)
"""Machines, one in each row.

`can`: whether the program can run there. `held`: entries of the program's files that are there. `step_s`: time of a
step there, at its present load. `row_s`: time that one more row adds to a step. `backlog_s`: time of the rows that wait
to be computed. `placed`: programs that were placed there, and that the record of the machine does not show yet.
"""

Table = npt.NDArray[np.void]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProgramNeeds:
    """Needs of a program."""

    num_entries: int = 0
    """Entries of its files."""
    entry_bytes: int = 0
    """Size of an entry, which a machine fetches if it is not there. 0: the machine computes it instead."""
    seed: int = 0
    """Random number that chooses one of several machines that are equally good."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The machine that was chosen, as a row of the table."""

    row: int
    """Number of the row. -1: no machine can run the program."""
    delays_s: Floats
    """Delay of each row. Infinite: the program can't run there."""


def choose(table: Table, wanted: ProgramNeeds) -> Choice:
    """Choose the machine on which a program waits least."""
    assert table.dtype == TABLE
    delays_s = np.where(table["can"], _delays_s(table, wanted), np.inf)
    if not len(table) or not table["can"].any():
        return Choice(-1, delays_s)
    near = np.flatnonzero(delays_s <= delays_s.min() * (1 + NEARLY))
    return Choice(int(near[wanted.seed % len(near)]), delays_s)


def _delays_s(table: Table, wanted: ProgramNeeds) -> Floats:
    missing, row_s = np.maximum(wanted.num_entries - table["held"], 0), table["row_s"]
    lacking = np.maximum(missing * wanted.entry_bytes - table["free_bytes"], 0)
    entry_s = wanted.entry_bytes / LINK_BYTES_S if wanted.entry_bytes else row_s
    new_s = table["placed"] * row_s
    delays_s: Floats = (
        lacking / EVICT_BYTES_S
        + AGAIN * missing * entry_s
        + table["backlog_s"]
        + TYPICAL_ROWS * new_s
        + TYPICAL_STEPS * (table["step_s"] + new_s)
    )
    return delays_s
