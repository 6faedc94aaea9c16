"""Who does a workload's jobs: Symphony with programs of its own, or a server with a client."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).resolve().parents[1] / "crowds"))

from attacked import ROOT, Attacked, attacked
from kinds import Job
from programs.work import Answer

HERE = Path(__file__).resolve().parent


class Side(Protocol):
    """One that takes its turn."""

    name: str

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer]]:
        """When the jobs were handed out (CLOCK_MONOTONIC), and what came of them."""
        ...

    def pids(self) -> list[int]:
        """The processes whose CPU time is its own, beside the children of this one that have ended."""
        ...


class Symphony:
    """A daemon, and for each job a process that is ready before the clock starts."""

    def __init__(self, name: str, daemon: Attacked, *, keeps_files: bool = False) -> None:
        self.name = name
        self._keeps_files = keeps_files
        self._daemon = daemon
        self._environment = daemon.environment

    def pids(self) -> list[int]:
        return [self._daemon.pid]

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer]]:
        with contextlib.ExitStack() as stack:
            programs = [stack.enter_context(self._program(job.kind)) for job in jobs]
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == "ready\n", f"{self.name}: a program did not start"
            lines = [json.dumps(job.work) + "\n" for job in jobs]
            began_s = time.monotonic()
            for program, line in zip(programs, lines, strict=True):
                assert program.stdin is not None
                program.stdin.write(line)
                program.stdin.flush()
            answers: list[Answer] = []
            for program in programs:
                assert program.stdout is not None
                line = program.stdout.readline()
                if not line:
                    raise SystemExit(
                        f"{self.name}: a program failed; the daemon's log:\n{self._daemon.log.read_text()[-2000:]}"
                    )
                answers += json.loads(line)
        if not self._keeps_files:
            for name in self._daemon.mount.glob("*.kv"):  # what programs shared has served its run
                name.unlink()
        return began_s, answers

    @contextmanager
    def _program(self, kind: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, HERE / "programs" / f"{kind}.py"]
        with subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            try:
                yield program
            except BaseException:
                program.kill()
                raise


class Served:
    """A server by its URL. With the number of its process group it is stopped while others have their turn."""

    def __init__(self, name: str, url: str, group: int | None, options: str) -> None:
        self.name = name
        self._group = group
        self._signal(signal.SIGCONT)  # a run before this one may have left it stopped
        command = [sys.executable, HERE / "client.py", url, *([options] if options else [])]
        self._client = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.about: dict[str, Any] = json.loads(self._read())
        self._signal(signal.SIGSTOP)

    def pids(self) -> list[int]:
        found = [self._client.pid]
        if self._group is not None:
            for path in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if path.name.isdigit() and os.getpgid(int(path.name)) == self._group:
                        found.append(int(path.name))
        return found

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer]]:
        line = json.dumps([{"kind": job.kind, "work": job.work} for job in jobs])
        with self.awake():
            began_s = time.monotonic()
            assert self._client.stdin is not None
            self._client.stdin.write(line + "\n")
            self._client.stdin.flush()
            return began_s, json.loads(self._read())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The server runs meanwhile."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self) -> str:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its client failed; is the server there?")
        return line

    def _signal(self, number: signal.Signals) -> None:
        if self._group is not None:
            os.killpg(self._group, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._client.kill()  # it has nothing to keep, and may be in the middle of a run that was given up
        self._client.wait()


@contextmanager
def symphony_side(
    precision: str, model: str, tree: Path, options: Sequence[str]
) -> Iterator[tuple[Symphony, Attacked]]:
    with attacked(argparse.Namespace(model=model, tree=tree), "--precision", precision, *options) as daemon:
        yield Symphony(f"symphony-{precision}", daemon), daemon


@contextmanager
def served_side(name: str, url: str, group: int | None, options: str) -> Iterator[Served]:
    side = Served(name, url, group, options)
    try:
        yield side
    finally:
        side.close()
