"""Samples of all machines of a fleet as lines of JSON: `symphony top --fleet --json`.

On each machine of the Ray cluster, `symphony top --json` prints its samples. A thread for each machine keeps the last
one. So a machine that does not answer delays nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import libsym
from libsym.errors import NotFound, SymError
from symphony.fleet.cluster import Cluster, Connection, Remote
from symphony.fleet.runner import ERRORS, OUTPUT, Request
from symphony.launcher.common.places import Refused
from symphony.views.top.lines import facts_of
from symphony.views.top.sampling import Daemon, Sample

LOOK_S = 5.0
"""Time between two looks at the cluster, for machines that are new or answer again."""
SILENT_S = 5.0
"""Time beyond the interval after which a machine counts as one that does not answer."""


@dataclass(slots=True)
class Heard:
    """Latest news from another machine."""

    facts: Mapping[str, Any] | None = None
    heard_s: float = field(default_factory=time.monotonic)
    """Time of the latest news, or of the question."""
    trouble: str = ""


class Followed:
    """The other machines of the user's Ray cluster, each followed by a thread."""

    def __init__(self, here: str, interval_s: float) -> None:
        self.machines = dict[str, Heard]()
        self.trouble = "Ray is being asked"
        """Reason why Ray does not answer."""
        self._here, self._interval_s = here, interval_s

    def run(self) -> NoReturn:
        """Follow the machines of the cluster as they come and go."""
        cluster, threads = Cluster.of_user(), dict[str, threading.Thread]()
        while True:
            try:
                with cluster.connection() as connection:
                    while True:
                        self.trouble = ""
                        for name in connection.machines():
                            if name == self._here or (name in threads and threads[name].is_alive()):
                                continue
                            threads[name] = threading.Thread(target=self._follow, args=(connection, name), daemon=True)
                            threads[name].start()
                        time.sleep(LOOK_S)
                        cluster.probe(cluster.first_machine() or "")  # else Ray would end this process after a minute
            except SymError as error:
                self.trouble = str(error)
            time.sleep(LOOK_S)

    def _follow(self, connection: Connection, name: str) -> None:
        """Keep the samples of a machine until it does not answer any more."""
        machine = self.machines[name] = self.machines.get(name) or Heard()
        machine.heard_s, rest = time.monotonic(), b""
        request = Request(os.getuid(), ("top", "--json", "--interval", str(self._interval_s)))
        try:
            for stream, content in Remote(connection, name).call(request):
                if stream == ERRORS:
                    lines = content.decode(errors="replace").strip().splitlines() or [""]
                    machine.facts, machine.trouble = None, lines[-1].removeprefix("symphony: ")
                elif stream == OUTPUT:
                    *whole, rest = (rest + content).split(b"\n")
                    if whole:
                        machine.facts, machine.trouble = json.loads(whole[-1]), ""
                        machine.heard_s = time.monotonic()
        except SymError as error:
            machine.facts, machine.trouble = None, str(error).removeprefix(f"{name} ")
        except ValueError:
            machine.facts, machine.trouble = None, "prints a line that is no sample"

    def news_of(self, name: str) -> tuple[Mapping[str, Any] | None, str]:
        """Return the latest sample of a machine, and its trouble."""
        machine = self.machines.get(name)
        if machine is None:
            return None, "" if self.trouble else "not in your Ray cluster"
        silent_s = time.monotonic() - machine.heard_s
        if not machine.trouble and silent_s > self._interval_s + SILENT_S:
            return None, f"no answer for {silent_s:.0f} s"
        return machine.facts, machine.trouble


def require_fleet(daemon: Daemon) -> Mapping[str, Any]:
    """Return the facts about the fleet. NotFound: the daemon is in none. NotConnected: the daemon does not answer."""
    fleet = _fleet_of(daemon.sample())
    libsym.close()
    return fleet


def print_fleet(daemon: Daemon, interval_s: float) -> NoReturn:
    """Print the machines of the fleet and their programs at intervals, until the user ends the command."""
    out = sys.stdout  # a connection to Ray replaces it
    fleet, before = require_fleet(daemon), None
    followed = Followed(fleet["machine"], interval_s)
    threading.Thread(target=followed.run, daemon=True).start()
    while True:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would print where the process was
        began_s, trouble, sample = time.monotonic(), "", None
        try:
            sample = daemon.sample()
            fleet = _fleet_of(sample)
        except (SymError, Refused) as error:
            trouble = str(error)
        here = None if sample is None else facts_of(before, sample)
        print(json.dumps(line(fleet, here, trouble, followed)), file=out, flush=True)
        before = sample
        time.sleep(max(0.0, began_s + interval_s - time.monotonic()))


def _fleet_of(sample: Sample) -> Mapping[str, Any]:
    """Return the facts about the fleet. NotFound: the daemon is in no fleet."""
    fleet: Mapping[str, Any] | None = sample.info.get("fleet")
    if fleet is None:
        raise NotFound("this daemon is in no fleet: see `etcd` in symphony.toml(5)")
    return fleet


def line(fleet: Mapping[str, Any], here: Mapping[str, Any] | None, trouble: str, followed: Followed) -> dict[str, Any]:
    listed, drained = fleet["machines"], fleet["drained"]
    machines, programs = {}, []
    for name in sorted({*listed, *drained, *followed.machines, fleet["machine"]}):
        facts, its_trouble = (here, trouble) if name == fleet["machine"] else followed.news_of(name)
        record = listed.get(name, {})
        found = [] if facts is None else [{**each, "machine": name} for each in facts["programs"]]
        state = ", ".join(["drained"] * (name in drained) + ["away"] * (name not in listed))
        programs += found
        machines[name] = {
            "state": state or ("" if its_trouble else "serves"),
            "trouble": its_trouble,
            "model": record.get("model", ""),
            "free_bytes": record.get("free_bytes"),
            "load": record.get("load"),
            "rates": None if facts is None else facts["rates"],
            "num_programs": len(found),
        }
    troubles = [each for each in (trouble, fleet["trouble"], followed.trouble) if each]
    return {
        "fleet": fleet["name"],
        "machine": fleet["machine"],
        "troubles": troubles,
        "machines": machines,
        "programs": programs,
    }
