"""Samples of a daemon as lines of JSON, which `symphony top --json` prints.

`symphony top --fleet` reads such lines from a process, so that neither Ray nor a machine can block or end the screen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import libsym as sym
from libsym.errors import SymError
from symphony.launcher.common.places import Refused
from symphony.views.rates import Rates
from symphony.views.top.columns import ProgramRow
from symphony.views.top.sampling import Daemon, Sample, program_rows


def print_samples(daemon: Daemon, interval_s: float) -> NoReturn:
    """Print the state of a daemon and its programs at intervals, until the user ends the command."""
    before, is_gone = None, False
    while True:
        began_s = time.monotonic()
        try:
            now = daemon.sample()
        except (SymError, Refused) as error:
            if not is_gone:
                print(f"symphony: {error}: trying again", file=sys.stderr, flush=True)
            before, is_gone = None, True
        else:
            print(json.dumps(facts_of(before, now)), flush=True)
            before, is_gone = now, False
        time.sleep(max(0.0, began_s + interval_s - time.monotonic()))


def facts_of(before: Sample | None, now: Sample) -> dict[str, Any]:
    """Return a sample with its rates since the previous one."""
    rates = None if before is None else Rates.between(before.info, now.info)
    programs = [
        {**asdict(row.program), "isolation": row.isolation, "tokens_per_s": row.tokens_per_s, "waiting": row.waiting}
        for row in program_rows(before, now)
    ]
    return {"rates": None if rates is None else asdict(rates), "programs": programs}


def row_of(facts: Mapping[str, Any]) -> ProgramRow:
    """Return the row of a program of a fleet. Its name and id have the machine's name before them."""
    machine = facts["machine"]
    program = sym.ProgramInfo.from_json(
        {**facts, "name": f"{machine}:{facts['name']}", "id": f"{machine}:{facts['id']}"}
    )
    return ProgramRow(program, facts["isolation"], facts["tokens_per_s"], facts["waiting"])
