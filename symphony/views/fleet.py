"""Lines that `symphony fleet status` prints."""

from __future__ import annotations

import time
from typing import Any

from symphony.views.reports import human_bytes


def fleet_lines(fleet: dict[str, Any]) -> list[str]:
    """Return the state of etcd, and a table of the machines. IDENTITY: facts that differ from those of this machine."""
    state = fleet["trouble"] or f"etcd answers at {fleet['etcd'][0]}"
    rows = [("MACHINE", "ADDRESS", "MODEL", "IDENTITY", "FREE", "SINCE")]
    for name, machine in fleet["machines"].items():
        here = "*" if name == fleet["machine"] else ""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(machine["since_s"]))
        differs = f"other {', '.join(machine['differs'])}" if machine["differs"] else "same"
        free = human_bytes(machine["free_bytes"])
        rows.append((name + here, machine["address"], machine["model"], differs, free, since))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = f"fleet {fleet['name']}, this machine is {fleet['machine']}: {state}"
    arrive = fleet["names_trouble"] or "changes of the other machines arrive"
    names = f"/fleet has {fleet['names']} names, {arrive}"
    return [head, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), names]
