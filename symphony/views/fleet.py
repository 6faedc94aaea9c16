"""Lines that `symphony fleet status` and `symphony fleet place` print."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from symphony.views.reports import counted, human_bytes


def fleet_lines(fleet: dict[str, Any]) -> list[str]:
    """Return the state of etcd, the names, the store and Ray, and a table of the machines. IDENTITY: facts that differ
    from those of this machine. HOLDS, ALONE, WRITES: see `symphony.fleet.draining.Holding`.
    """
    etcd = fleet["trouble"] or f"etcd answers at {fleet['etcd'][0]}"
    rows = [("MACHINE", "STATE", "ADDRESS", "MODEL", "IDENTITY", "FREE", "HOLDS", "ALONE", "WRITES", "SINCE")]
    machines, drained, holdings = fleet["machines"], fleet["drained"], fleet["holdings"]
    for name in sorted({*machines, *drained, *holdings}):
        here = "*" if name == fleet["machine"] else ""
        state = ", ".join(["drained"] * (name in drained) + ["away"] * (name not in machines)) or "serves"
        held = holdings.get(name, {})
        counts = tuple(str(held.get(each, 0)) for each in ("versions", "alone", "writing"))
        machine = machines.get(name)
        if machine is None:
            rows.append((name + here, state, "-", "-", "-", "-", *counts, "-"))
            continue
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(machine["since_s"]))
        differs = f"other {', '.join(machine['differs'])}" if machine["differs"] else "same"
        free = human_bytes(machine["free_bytes"])
        rows.append((name + here, state, machine["address"], machine["model"], differs, free, *counts, since))
    head = f"fleet {fleet['name']}, this machine is {fleet['machine']}: {etcd}"
    arrive = fleet["names_trouble"] or "changes of the other machines arrive"
    names = f"/fleet has {fleet['names']} names, {arrive}; {fleet['copies_missing']} copies are missing"
    store = fleet.get("store")  # None: none is set, or an older daemon reports none
    ray = fleet.get("ray")
    others = [ray["trouble"] or f"Ray at {ray['address']} answers"] if ray else []
    return [head, *_columns(rows), names, *([_store_line(store)] if store else []), *others]


def holding_text(fleet: dict[str, Any], machine: str) -> str:
    """Say what keeps a drained machine in the fleet."""
    held, machines = fleet["holdings"].get(machine), fleet["machines"]
    if held is None:
        return f"{machine} can go: the fleet needs none of its files"
    versions, files = counted(held["versions"], "version"), counted(held["writing"], "file")
    text = f"{machine} has {versions}, and writes {files}"
    if held["stuck"]:
        return f"{text}; no machine of this model stays to copy {held['stuck']} of them"
    if held["alone"] and machine not in machines:
        return (
            f"{text}; it is away, and no other machine has {held['alone']} of them: start it, or give them up by "
            f"symphony fleet leave --force {machine}"
        )
    num_staying = len(machines.keys() - {*fleet["drained"]})
    if held["writing"] and num_staying < fleet["copies"]:
        return f"{text}; syncs fail, because `copies` is {fleet['copies']}, and only {num_staying} of the machines stay"
    return text


def _store_line(store: dict[str, Any]) -> str:
    pages = f"{store['pages_got']} pages came from it, {store['pages_put']} were put"
    return f"store {store['master']}: {store['trouble'] or 'it answers'}, {pages}"


def place_lines(found: dict[str, Any]) -> list[str]:
    """Return the machine for a program and the reason, and a table of the machines, the best one first.

    CALLS: mean number of calls in a step. DELAY: time that the program would wait there, by `symphony.fleet.placement`.
    """
    machines = found["machines"]
    order = sorted(machines, key=lambda name: (name != found["machine"], machines[name]["delay_s"] or math.inf, name))
    rows = [("MACHINE", "ENTRIES", "FREE", "CALLS", "DELAY", "")]
    for name in order:
        each, here = machines[name], "*" if name == found["here"] else ""
        calls = "-" if each["calls"] is None else str(each["calls"])
        delay = "-" if each["delay_s"] is None else f"{each['delay_s']:.2f} s"
        rows.append(
            (name + here, f"{each['entries']:,}", human_bytes(each["free_bytes"]), calls, delay, each["refusal"])
        )
    return [f"{found['machine']}: {found['reason']}", *_columns(rows)]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
