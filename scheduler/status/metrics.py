"""Metrics in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Labels: TypeAlias = Mapping[str, str]
Value: TypeAlias = float | int


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric with its samples. A sample is a suffix of the name, labels, and a value."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    help: str
    samples: Sequence[tuple[str, Labels, Value]]


def gauge(name: str, help_text: str, value: Value, labels: Labels | None = None) -> Metric:
    """Return a metric whose value goes up and down."""
    return Metric(name, "gauge", help_text, [("", labels or {}, value)])


def counter(name: str, help_text: str, value: Value) -> Metric:
    """Return a metric whose value only grows while the daemon lives."""
    return Metric(name, "counter", help_text, [("", {}, value)])


def counters(name: str, help_text: str, label: str, values: Mapping[str, Value]) -> Metric:
    """Return a metric with a counter for each value of a label."""
    return Metric(name, "counter", help_text, [("", {label: key}, value) for key, value in values.items()])


def histogram(name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: Value) -> Metric:
    """Return a metric that counts values by bounds. The last of `counts` is for values beyond the last bound."""
    assert len(counts) == len(bounds) + 1
    samples: list[tuple[str, Labels, Value]] = []
    below = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        below += count
        samples.append(("_bucket", {"le": bound}, below))
    samples += [("_sum", {}, total), ("_count", {}, below)]
    return Metric(name, "histogram", help_text, samples)


def exposition(metrics: Iterable[Metric]) -> str:
    """Return the text of these metrics."""
    return "".join(map(_text, metrics))


def _text(metric: Metric) -> str:
    lines = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
    lines += [f"{metric.name}{suffix}{_labels(labels)} {_number(value)}" for suffix, labels, value in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"
