"""Symphony's sides of workloads that do not fit into memory: one daemon, and who decides what stays there."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attacked import Attacked, attacked
from kinds import Job
from programs.work import Answer
from sides import Symphony

import libsym as sym


class Daemon:
    """One whose policy changes while it runs, by its configuration file."""

    def __init__(self, daemon: Attacked, config: Path) -> None:
        self.attacked = daemon
        self._config = config
        self._num_reloads = 0
        self._policy = ""
        sym.connect(daemon.socket)
        while self.statistics()["weights"] != "loaded":
            time.sleep(0.05)

    def statistics(self) -> dict[str, Any]:
        return sym.daemon_stat()

    def use(self, policy: str) -> None:
        if policy == self._policy:
            return
        self._config.write_text(f'policy = "{policy}"\n')
        os.kill(self.attacked.pid, signal.SIGHUP)
        self._num_reloads += 1
        self._policy = policy
        while (outcome := self.statistics()["config"])["reloads"] < self._num_reloads:
            time.sleep(0.02)
        if outcome["error"] is not None or outcome["needs_restart"]:
            raise SystemExit(f"--policy {policy}: {outcome}")


class Policy(Symphony):
    """The daemon with one policy; `keeps` is what the program does beside it."""

    def __init__(self, name: str, daemon: Daemon, policy: str, keeps: str) -> None:
        super().__init__(name, daemon.attacked, keeps_files=True)
        self._policed = daemon
        self._policy = policy
        self._keeps = keeps
        self.told: dict[str, float] = {}
        """By the daemon, of the last run: what its counts grew by."""

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer]]:
        self._policed.use(self._policy)
        before = counts(self._policed.statistics())
        found = super().run([replace(job, work=job.work | {"keeps": self._keeps}) for job in jobs])
        after = counts(self._policed.statistics())
        self.told = {name: after[name] - before[name] for name in after}
        return found


def counts(info: dict[str, Any]) -> dict[str, float]:
    """What only grows: tokens that were computed, and what the tiers did."""
    tiers = info.get("tiers", {})
    found = {name: value for name, value in tiers.items() if isinstance(value, (int, float))}
    return found | {"num_prefill_tokens": info["num_prefill_tokens"]}


@contextmanager
def policed(model: str, tree: Path, precision: str, *options: str) -> Iterator[Daemon]:
    """A daemon; this process is connected to it for as long as it runs."""
    with TemporaryDirectory() as directory:
        config = Path(directory) / "symphony.toml"
        config.write_text("")
        args = argparse.Namespace(model=model, tree=tree)
        with attacked(args, "--precision", precision, "--config", str(config), *options) as daemon:
            try:
                yield Daemon(daemon, config)
            finally:
                sym.close()
