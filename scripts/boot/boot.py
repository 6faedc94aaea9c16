#!/usr/bin/env python3
"""Boots a Debian root in systemd-nspawn, installs Symphony there as a service, and runs scenarios on it.

A scenario that succeeds prints `ok NAME (seconds)` and its measurements. A scenario that fails prints the reason, and
the journal since the scenario began. Parts that do not change (the root, wheels, the previous release) are made once
and kept below --work. A run copies the root, boots the copy and removes it. The machine has no network.

Run as root, with the repository's interpreter: .venv/bin/python scripts/boot/boot.py --log boot.log
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kept import Kept
from machine import Failed, Machine
from running import Service
from scenarios import ALWAYS, SCENARIOS, SHORT


class Report:
    """Output to the terminal, and to a file if one is named."""

    def __init__(self, log: Path | None) -> None:
        self._log = log.open("w") if log else None

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()


def one(scenario: Callable[[Service], str | None], service: Service, report: Report) -> bool:
    """Run a scenario, and return whether it succeeded."""
    name, began_s, since_s = name_of(scenario), time.monotonic(), time.time()
    service.run("systemctl reset-failed")  # systemd limits the starts of a unit, and scenarios start a unit more often
    try:
        measured = scenario(service)
    except Failed as error:
        report.say(f"FAILED {name} ({time.monotonic() - began_s:.1f} s)\n{error}")
        report.say("\n".join(f"    {line}" for line in service.machine.journal(since_s).splitlines()))
        return False
    report.say(f"ok {name} ({time.monotonic() - began_s:.1f} s)")
    for line in (measured or "").splitlines():
        report.say(f"    {line}")
    return True


def name_of(scenario: Callable[[Service], str | None]) -> str:
    return scenario.__name__.replace("_", "-")


def run(arguments: argparse.Namespace, report: Report) -> list[str]:
    """Boot a machine and run the scenarios. Return the names of the scenarios that failed."""
    kept = Kept(arguments.work, arguments.work / "made.log", thin=arguments.quick or arguments.thin)
    binds = kept.make(previous=not arguments.quick)
    name = f"symphony-boot-{os.getpid()}"
    root = kept.root(name)
    machine = Machine(root, name, binds)
    failed = []
    try:
        began_s = time.monotonic()
        machine.boot()
        report.say(f"booted {machine.run('. /etc/os-release; echo $PRETTY_NAME')} ({time.monotonic() - began_s:.1f} s)")
        service = Service(machine, is_short=arguments.quick)
        service.prepare()
        for scenario in SHORT if arguments.quick else SCENARIOS:
            if arguments.only and name_of(scenario) not in arguments.only and scenario not in ALWAYS:
                continue
            if not one(scenario, service, report):
                failed.append(name_of(scenario))
                if scenario in ALWAYS:  # the other scenarios depend on this one
                    break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        machine.stop()
        if arguments.keep:
            report.say(f"kept {root}: look into it with systemd-nspawn --register=no --directory={root}")
        else:
            kept.remove(name)
    return failed


def over(_number: int, _frame: FrameType | None) -> None:
    raise Failed("the limit is reached (--limit MINUTES)")


def main() -> int:
    names = [name_of(each) for each in SCENARIOS]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description="Boot a Debian with Symphony as a service, and see that it serves.")
    parser.add_argument("--only", action="append", choices=names, metavar="SCENARIO", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(map(name_of, SHORT))} alone, thin")
    parser.add_argument("--thin", action="store_true", help="empty wheels for other packages: their files are in .venv")
    parser.add_argument("--work", type=Path, default=cache / "symphony-boot", help="directory of roots (several GB)")
    parser.add_argument("--limit", type=float, default=60.0, metavar="MINUTES", help="limit of the run (default 60)")
    parser.add_argument("--keep", action="store_true", help="keep the root of this run, shut down")
    parser.add_argument("--log", type=Path, help="also write the output to this file")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("only root may boot a machine")
    signal.signal(signal.SIGALRM, over)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.setitimer(signal.ITIMER_REAL, arguments.limit * 60)
    report = Report(arguments.log)
    began_s = time.monotonic()
    failed = run(arguments, report)
    minutes = (time.monotonic() - began_s) / 60
    report.say(f"{'failed: ' + ', '.join(failed) if failed else 'all held'} ({minutes:.1f} minutes)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
