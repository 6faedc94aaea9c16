"""The lines above the tables: the load of the whole daemon, now and over time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Sparkline, Static

import libsym as sym
from symphony.views.rates import Rates, TimeQuantiles, human_count, human_time
from symphony.views.reports import human_bytes, human_uptime
from symphony.views.top.sampling import Sample

NUM_KEPT = 240
"""Number of samples that a curve keeps."""
NUM_USERS = 4
SERIES = ("tokens", "steps", "batch", "calls", "waits")


class Curve(Horizontal):
    """Line of the overview: a name, the present value, and a curve of the earlier values."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._values: deque[float] = deque(maxlen=NUM_KEPT)

    def compose(self) -> ComposeResult:
        yield Static(classes="now", markup=False)
        yield Sparkline([], summary_function=max)

    def add(self, value: float, words: str) -> None:
        self._values.append(value)
        self.query_one(Sparkline).data = list(self._values)
        self.query_one(".now", Static).update(Text(words, no_wrap=True, overflow="ellipsis"))

    def reset(self) -> None:
        self._values.clear()
        self.add(0.0, f"{self.id or '':7}-")


class Overview(Vertical):
    """Widget with all lines above the tables."""

    def compose(self) -> ComposeResult:
        yield Static(id="daemon", markup=False)
        for name in SERIES:
            yield Curve(name)
        yield Static(id="states", markup=False)
        yield Static(id="users", markup=False)

    def reset(self) -> None:
        """Clear all lines: the daemon is gone, or is another daemon."""
        for curve in self.query(Curve):
            curve.reset()
        self.query_one("#daemon", Static).update("")
        self.query_one("#states", Static).update("")
        self.query_one("#users", Static).update("")

    def show(self, sample: Sample, rates: Rates | None) -> None:
        self.query_one("#daemon", Static).update(_line(_daemon_parts(sample)))
        self.query_one("#states", Static).update(
            _line(_state_parts(sample.programs, sample.info["waiting_calls"], sample.info["tiers"]))
        )
        self.query_one("#users", Static).update(_line(_user_parts(sample.info.get("users", ()))))
        if rates is not None:
            for name, value, words in _curves(rates):
                self.query_one(f"#{name}", Curve).add(value, f"{name:7}{words}")


def _line(parts: Sequence[tuple[str, str]]) -> Text:
    return Text("  ").join(Text.assemble((f"{name} ", "dim"), text) for name, text in parts).copy()


def _daemon_parts(sample: Sample) -> list[tuple[str, str]]:
    info = sample.info
    tiers = info["tiers"]
    used = human_bytes((tiers["num_frames"] - tiers["num_free_frames"]) * info["page_bytes"])
    total = human_bytes(tiers["num_frames"] * info["page_bytes"])
    disk = info["disk"]
    state = "" if info["weights"] == "loaded" else f", weights {info['weights']}"
    return [
        ("model", f"{info['model']}{state}"),
        ("up", human_uptime(info["uptime_s"])),
        ("memory", f"{used} of {total}"),
        ("disk alone", human_bytes(tiers["num_on_disk_alone"] * info["page_bytes"])),
        ("disk", human_bytes(disk["disk_bytes"]) + (f" FAILS: {disk['error']}" if disk["error"] else "")),
        ("names", human_count(info["num_names"])),
    ]


def _state_parts(
    programs: Sequence[sym.ProgramInfo], num_calls: int, tiers: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the number of calls in flight, and the number of visible programs in each state."""
    states = Counter(each.state for each in programs)
    told = [f"{count} {name}" for name, count in states.most_common()]
    waiting = f", {tiers['num_waiting']} wait for pages" if tiers["num_waiting"] else ""
    return [("now", f"{num_calls} calls under way{waiting}"), ("programs", ", ".join(told) or "none")]


def _user_parts(users: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the visible users that take most of the daemon's own memory, each with its largest kinds of objects."""
    parts = []
    for user in users[:NUM_USERS]:
        holds = ", ".join(f"{human_count(count)} {kind}" for kind, count in [*user["holds"].items()][:3])
        parts.append((f"uid {user['uid']}", f"{human_bytes(user['memory_bytes'])}: {holds or 'nothing'}"))
    return parts


def _curves(rates: Rates) -> list[tuple[str, float, str]]:
    prefill = f", {human_count(rates.prefill_per_s)} of prefills" if rates.prefill_per_s >= 0.5 else ""
    return [
        ("tokens", rates.tokens_per_s, f"{human_count(rates.tokens_per_s)}/s{prefill}"),
        ("steps", rates.steps_per_s, f"{human_count(rates.steps_per_s)}/s, {_times(rates.steps)}"),
        ("batch", rates.calls_a_step, f"{rates.calls_a_step:.1f} calls, {rates.rows_a_step:.1f} rows in a step"),
        ("calls", rates.calls.p99_s or 0.0, f"{human_count(rates.calls_per_s)}/s, {_times(rates.calls)}"),
        ("waits", rates.waits.p99_s or 0.0, _times(rates.waits)),
    ]


def _times(times: TimeQuantiles) -> str:
    """Format the median and the 99th percentile."""
    return "-" if times.p50_s is None else f"p50 {human_time(times.p50_s)}, p99 {human_time(times.p99_s)}"
