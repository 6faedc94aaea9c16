"""What a run of a workload is summed up to: how long answers took, what was computed for them, what the tiers did."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from kinds import Job
from load import Others
from programs.work import Answer
from sides import Side

WARM = "warm"
"""The label of answers that do not count."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One kind of answers of a workload, on one side, of all rounds."""

    wall_s: float
    """From the first question to the last token."""
    took_s: list[float]
    """Each answer, from asking to its last token."""
    first_s: list[float]
    """Each answer's first token."""
    computed: float | None = None
    """Tokens of prompts that were computed; none: the side does not tell."""
    held: list[int] = dataclasses.field(default_factory=list)
    """Tokens whose KV was held, after each answer."""
    told: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the daemon's counts grew by, of all kinds of answers together."""
    load: float = 0.0
    others: float = 0.0
    """The share of the cores that others took, at most."""

    @classmethod
    def of(cls, answers: list[Answer]) -> Sample:
        asked = [answer["asked_s"] for answer in answers]
        known = [answer["computed"] for answer in answers if "computed" in answer]
        return cls(
            max(answer["came_s"][-1] for answer in answers) - min(asked),
            [answer["came_s"][-1] - answer["asked_s"] for answer in answers],
            [answer["came_s"][0] - answer["asked_s"] for answer in answers],
            sum(known) if len(known) == len(answers) else None,
            [answer["held"] for answer in answers if "held" in answer],
        )

    def joined(self, other: Sample) -> Sample:
        """Of two rounds."""
        computed = None if self.computed is None or other.computed is None else self.computed + other.computed
        return Sample(
            self.wall_s + other.wall_s,
            self.took_s + other.took_s,
            self.first_s + other.first_s,
            computed,
            self.held + other.held,
            {name: self.told.get(name, 0) + value for name, value in other.told.items()},
            max(self.load, other.load),
            max(self.others, other.others),
        )

    @property
    def rate(self) -> float:
        return len(self.took_s) / self.wall_s


def measure(side: Side, jobs: list[Job]) -> dict[str, Sample]:
    """By label."""
    load, others = os.getloadavg()[0], Others(side.pids())
    _, answers = side.run(jobs)
    share = others.share()
    num_tokens, expected = sum(len(answer["tokens"]) for answer in answers), sum(job.num_tokens for job in jobs)
    if num_tokens != expected:
        raise SystemExit(f"{side.name} gave {num_tokens} tokens, {expected} were asked for: not the same work")
    counted = [answer for answer in answers if answer.get("label") != WARM]
    labels = sorted({answer.get("label", "") for answer in counted})
    groups = {label: [answer for answer in counted if answer.get("label", "") == label] for label in labels}
    if len(groups) > 1:
        groups["all"] = counted
    told: dict[str, float] = getattr(side, "told", {})
    return {
        label: dataclasses.replace(Sample.of(group), told=told, load=load, others=share)
        for label, group in groups.items()
    }


def quantile(values: Iterable[float], share: float) -> float:
    """A value that so many do not exceed; of few values the highest."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def table(samples: Mapping[str, Mapping[str, Any]]) -> str:
    heading = (
        f"{'case':24}{'side':22}{'answers':>8}{'a second':>9}{'mean s':>8}{'p50':>8}{'p99':>8}{'first p50':>10}"
        f"{'p99':>8}{'computed':>10}{'held mean':>10}{'max':>8}{'resumes':>8}{'hidden':>7}{'load':>6}{'others':>7}"
    )
    lines = [heading]
    for case, by_side in samples.items():
        lines += [_line(case, side, sample) for side, sample in by_side.items()]
    return "\n".join(lines) + "\n"


def _line(case: str, side: str, sample: Sample) -> str:
    resumes, hidden = sample.told.get("num_resumes", 0), sample.told.get("num_hidden", 0)
    computed = "-" if sample.computed is None else f"{sample.computed:.0f}"
    held = (f"{statistics.mean(sample.held):.0f}", f"{max(sample.held)}") if sample.held else ("-", "-")
    return (
        f"{case:24}{side:22}{len(sample.took_s):>8}{sample.rate:>9.2f}{statistics.mean(sample.took_s):>8.3f}"
        f"{quantile(sample.took_s, 0.5):>8.3f}{quantile(sample.took_s, 0.99):>8.3f}"
        f"{quantile(sample.first_s, 0.5):>10.3f}{quantile(sample.first_s, 0.99):>8.3f}{computed:>10}"
        f"{held[0]:>10}{held[1]:>8}{resumes or '-':>8}{f'{hidden / resumes:.0%}' if resumes else '-':>7}"
        f"{sample.load:>6.1f}{sample.others:>7.0%}"
    )
