"""Sides that run a workload's jobs in turns: Symphony with its programs, or a server with a client."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness import (
    RESULTS,
    ROOT,
    Daemon,
    Others,
    arguments,
    least_disturbed,
    pairs,
    processor,
    quantile,
    ratio,
    read_line,
    rotated,
    write_line,
)
from work import Answer, Job, Words

HERE = Path(__file__).resolve().parent
WARM = "warm"
"""The label of answers that do not count."""


class Side(Protocol):
    """A side of the comparison."""

    name: str

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer], dict[str, float]]:
        """Run jobs. Return the time when they began (CLOCK_MONOTONIC), the answers, and the growth of the daemon's
        counters.
        """
        ...

    def pids(self) -> list[int]:
        """Return the processes of this side. Children of the benchmark that have ended belong to it, too."""
        ...


class Symphony:
    """A daemon with a process for each job. The processes are ready before the measured time begins."""

    def __init__(
        self, name: str, daemon: Daemon, *, config: Path | None = None, policy: str = "", keeps: bool = True
    ) -> None:
        """`config`: the daemon's configuration file, in which `policy` is set before each run. With `config`, the KV
        files of one run stay for the next; otherwise each run removes its files.
        """
        self.name, self._daemon, self._config, self._policy, self._keeps = name, daemon, config, policy, keeps

    def pids(self) -> list[int]:
        return [self._daemon.pid]

    def _set_policy(self, config: Path) -> None:
        text, before = f'policy = "{self._policy}"\n', self._daemon.stat()["config"]["reloads"]
        if not self._policy or config.read_text() == text:
            return
        config.write_text(text)
        os.kill(self._daemon.pid, signal.SIGHUP)
        while (outcome := self._daemon.stat()["config"])["reloads"] == before:
            time.sleep(0.02)
        if outcome["error"] is not None or outcome["needs_restart"]:
            raise SystemExit(f"policy {self._policy}: {outcome}")

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer], dict[str, float]]:
        if self._config:
            self._set_policy(self._config)
        before = counts(self._daemon.stat())
        with contextlib.ExitStack() as stack:
            programs = [stack.enter_context(self._program(job.kind)) for job in jobs]
            for program in programs:
                assert read_line(program) == "ready"
            lines = [json.dumps(job.work | {"keeps": self._keeps}) for job in jobs]
            began_s = time.monotonic()
            for program, line in zip(programs, lines, strict=True):
                write_line(program, line)
            answers: list[Answer] = []
            for program in programs:
                answers += json.loads(read_line(program))
        after = counts(self._daemon.stat())
        if not self._config:
            for name in self._daemon.mount.glob("*.kv"):
                name.unlink()
        return began_s, answers, {name: after[name] - before[name] for name in after}

    @contextmanager
    def _program(self, kind: str) -> Iterator[subprocess.Popen[str]]:
        command: list[str | Path] = [sys.executable, HERE / "own_programs.py", kind]
        pipe, environment = subprocess.PIPE, self._daemon.environment
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as program:
            try:
                yield program
            except BaseException:
                program.kill()
                raise


def counts(info: dict[str, Any]) -> dict[str, float]:
    """Return the counters that only grow: prefill tokens, and the counters of the tiers."""
    found = {name: value for name, value in info.get("tiers", {}).items() if isinstance(value, (int, float))}
    return found | {"num_prefill_tokens": info["num_prefill_tokens"]}


class Served:
    """A server at a URL. With `group` the server is stopped while other sides have their turn.

    `own_pids` are the processes of a server that is never stopped.
    """

    def __init__(self, name: str, url: str, group: int | None, options: str, own_pids: Sequence[int] = ()) -> None:
        self.name, self._group, self._own_pids = name, group, own_pids
        self._signal(signal.SIGCONT)  # a run before this one may have left it stopped
        command: list[str | Path] = [sys.executable, HERE / "clients.py", url, *([options] if options else [])]
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
        self._client = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.about: dict[str, Any] = json.loads(read_line(self._client))
        self._signal(signal.SIGSTOP)

    def pids(self) -> list[int]:
        found = [self._client.pid, *self._own_pids]
        if self._group is not None:
            for path in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if path.name.isdigit() and os.getpgid(int(path.name)) == self._group:
                        found.append(int(path.name))
        return found

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Answer], dict[str, float]]:
        line = json.dumps([{"kind": job.kind, "work": job.work} for job in jobs])
        self._signal(signal.SIGCONT)
        try:
            began_s = time.monotonic()
            write_line(self._client, line)
            return began_s, json.loads(read_line(self._client)), {}
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._group is not None:
            os.killpg(self._group, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._client.kill()  # the client may be in the middle of an aborted run
        self._client.wait()


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of the answers with one label in a run."""

    tokens_per_s: float
    took_s: list[float]
    """Time from the request to the last token, for each answer."""
    first_s: list[float]
    """Time from the request to the first token, for each answer."""
    gap_p50_ms: float
    """Median time between tokens of one sequence."""
    gap_p99_ms: float
    computed: int | None
    """Number of prompt tokens that were computed. None: the side does not report it."""
    told: dict[str, float]
    """Growth of the daemon's counters during the run, for all labels together."""
    load: float
    """Load of the machine over the minute before the run."""
    others: float
    """Known share of the cores that other processes used during the run."""


@dataclass(frozen=True, slots=True)
class Turn:
    samples: dict[str, Sample]
    """Samples by the label of the answers."""
    others: float


def measure(side: Side, jobs: list[Job]) -> Turn:
    load, others = os.getloadavg()[0], Others(side.pids())
    began_s, answers, told = side.run(jobs)
    share = others.share()
    num_tokens, expected = sum(len(answer["tokens"]) for answer in answers), sum(job.num_tokens for job in jobs)
    if num_tokens != expected:
        raise SystemExit(f"{side.name} gave {num_tokens} tokens, {expected} were asked for: not the same work")
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if (label := answer.get("label", "")) != WARM:
            groups.setdefault(label, []).append(answer)
    if len(groups) > 1:
        groups["all"] = [answer for group in groups.values() for answer in group]
    samples = {}
    for label, group in groups.items():
        since_s = min(answer["asked_s"] for answer in group) if label else began_s
        known = [answer["computed"] for answer in group if "computed" in answer]
        gaps_s = [gap for answer in group for gap in map(lambda a, b: b - a, answer["came_s"], answer["came_s"][1:])]
        samples[label] = Sample(
            sum(len(answer["tokens"]) for answer in group) / (max(answer["came_s"][-1] for answer in group) - since_s),
            [answer["came_s"][-1] - answer["asked_s"] for answer in group],
            [answer["came_s"][0] - answer["asked_s"] for answer in group],
            1e3 * quantile(gaps_s, 0.5),
            1e3 * quantile(gaps_s, 0.99),
            sum(known) if len(known) == len(group) else None,
            told,
            load,
            share,
        )
    return Turn(samples, share)


class Bench:
    """A comparison: its options, the words for prompts, and its samples by case, side and round."""

    def __init__(self, args: argparse.Namespace, tokens: list[int]) -> None:
        self.args, self._tokens = args, tokens
        about = f"{args.model}; scale {args.scale:g}" if "scale" in args else f"{args.model}, {args.precision}"
        self.heading = f"{processor()}; {about}; {time.strftime('%Y-%m-%d')}"
        self.samples: dict[str, dict[str, list[Sample]]] = {}

    def words(self, name: str) -> Words:
        return Words(self._tokens, f"{name}-{self.args.seed}")

    def turns(
        self, case: str, sides: Sequence[Side], make: Callable[[Words], list[Job]], *, is_same: bool = False
    ) -> None:
        """Run the jobs on all sides in turns, with new words each time. With `is_same` all sides get the same words."""
        for number in range(self.args.rounds):
            for side in rotated(sides, number):
                tries = itertools.count()

                def once(side: Side = side, number: int = number, tries: Iterator[int] = tries) -> Turn:
                    name = f"{case}-{number}-{next(tries)}"
                    return measure(side, make(self.words(name if is_same else f"{name}-{side.name}")))

                for label, sample in least_disturbed(once, self.args).samples.items():
                    by_side = self.samples.setdefault(f"{case} {label}".strip(), {})
                    by_side.setdefault(side.name, []).append(sample)
                note = f"{sample.tokens_per_s:9.1f} tokens/s, others {sample.others:.0%}, {next(tries)} tries"
                print(f"  {number} {case:16}{side.name:18}{note}", file=sys.stderr, flush=True)
            self.save(self.table())  # keeps the results if the script is stopped

    def save(self, text: str) -> None:
        if self.args.save:
            (RESULTS / f"{self.args.save}.txt").write_text(f"{self.heading}\n\n{text}")

    def table(self) -> str:
        heads = (
            f"{'case':24}{'side':22}{'tokens/s':>9}{'least to most':>16}{'ratio':>7}{'answers':>8}{'took p50 s':>11}"
            f"{'first p50':>10}{'p99':>8}{'gap p50 ms':>11}{'p99':>8}{'computed':>9}{'pages in':>9}{'load':>6}"
            f"{'others':>8}"
        )
        lines = [heads]
        for case, by_side in self.samples.items():
            base = [run.tokens_per_s for run in next(iter(by_side.values()))]
            for side, runs in by_side.items():
                rates = [run.tokens_per_s for run in runs]
                beside = f"{ratio(base, rates):.2f}" if len(base) == len(rates) else "-"
                took_s, first_s = (
                    [each for run in runs for each in getattr(run, name)] for name in ("took_s", "first_s")
                )
                known = [run.computed for run in runs if run.computed is not None]
                computed = str(sum(known)) if len(known) == len(runs) else "-"
                pages = round(sum(run.told.get("num_in", 0) for run in runs))
                gaps_ms = [
                    statistics.median(getattr(run, name) for run in runs) for name in ("gap_p50_ms", "gap_p99_ms")
                ]
                lines.append(
                    f"{case:24}{side:22}{statistics.median(rates):>9.1f}{f'{min(rates):.0f} to {max(rates):.0f}':>16}"
                    f"{beside:>7}{len(took_s):>8}{quantile(took_s, 0.5):>11.3f}"
                    f"{quantile(first_s, 0.5):>10.3f}{quantile(first_s, 0.99):>8.3f}"
                    f"{gaps_ms[0]:>11.2f}{gaps_ms[1]:>8.1f}{computed:>9}{pages or '-':>9}"
                    f"{max(run.load for run in runs):>6.1f}{max(run.others for run in runs):>8.0%}"
                )
        return (
            "\n".join([*lines, "", "ratio: of the first side's tokens/s to this side's, the median of the rounds'"])
            + "\n"
        )

    def show(self, text: str, **facts: Any) -> None:
        self.save(text)
        samples = {
            case: {side: [asdict(run) for run in runs] for side, runs in by_side.items()}
            for case, by_side in self.samples.items()
        }
        whole = {"heading": self.heading, "samples": samples} | facts
        print(json.dumps(whole) if self.args.json else f"{self.heading}\n\n{text}", end="")


def options(description: str | None, **more: Any) -> argparse.Namespace:
    """Parse the options of all workloads, and `more`. With `--quick` there is one round, and no wait for quiet."""
    servers: dict[str, Any] = {"server": [], "group": [], "options": []}
    seed = (str(int(time.time())), "of the prompts")
    sizes = {"rounds": 3, "quiet": 0.1, "tries": 3, "patience": 10.0, "seed": seed}
    args = arguments(
        description, **more, model="smollm2", precision="bf16", save=str, **sizes, **servers, quick=False, json=False
    ).parse_args()
    if args.quick:
        args.rounds, args.tries, args.patience = 1, 1, 0.0
    return args


def servers(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[Side]:
    """Start a client for each server of `--server`. The stack ends the clients."""
    groups, options, found = pairs(args.group), pairs(args.options), list[Side]()
    for name, url in pairs(args.server).items():
        served = Served(name, url, int(groups[name]) if name in groups else None, options.get(name, ""))
        stack.callback(served.close)
        found.append(served)
    return found
