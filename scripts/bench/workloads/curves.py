"""The paper's figure: throughput and mean latency of RAG against the Pareto index, a line for each side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from html import escape

from latencies import Sample
from plot import COLORS, STYLE

WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 240, 60, 60, 70
LEGEND = 170


def of_rag(samples: Mapping[str, Mapping[str, Sample]], heading: str) -> str:
    """From cases that are called `rag INDEX questions`; steep is on the right."""
    found = {float(case.split()[1]): by_side for case, by_side in samples.items() if case.startswith("rag ")}
    indices = sorted(found, reverse=True)
    sides = list(dict.fromkeys(side for index in indices for side in found[index]))
    width = LEFT + 2 * WIDTH + GAP + LEGEND
    size = f'width="{width}" height="{TOP + HEIGHT + 60}" viewBox="0 0 {width} {TOP + HEIGHT + 60}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>{STYLE}polyline{{fill:none;stroke-width:2}}</style>",
        '<text x="10" y="18">RAG: who keeps which documents, by the Pareto index of their popularity</text>',
        f'<text x="10" y="34" class="small">{escape(heading)}</text>',
    ]
    rates = {side: {index: found[index][side].rate for index in indices if side in found[index]} for side in sides}
    means = {
        side: {index: statistics.mean(found[index][side].took_s) for index in indices if side in found[index]}
        for side in sides
    }
    if indices:
        parts += _panel(LEFT, "answers a second", indices, rates)
        parts += _panel(LEFT + WIDTH + GAP, "seconds for an answer, mean", indices, means)
    for number, side in enumerate(sides):
        x, y = LEFT + 2 * WIDTH + GAP + 20, TOP + 18 * number
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLORS[number % len(COLORS)]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 9}" class="small">{escape(side)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, title: str, indices: list[float], lines: Mapping[str, Mapping[float, float]]) -> list[str]:
    """One diagram, its values by powers of ten."""
    values = [value for line in lines.values() for value in line.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(index: float) -> float:
        return left + WIDTH * (indices.index(index) + 0.5) / len(indices)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - (math.log10(value) - low) / (high - low))

    parts = [f'<text x="{left}" y="{TOP - 10}">{title}</text>']
    for power in range(low, high + 1):
        for step in (1, 2, 5) if power < high else (1,):
            value = step * 10.0**power
            parts.append(
                f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" opacity=".4"/>'
            )
            parts.append(
                f'<text x="{left - 6}" y="{y(value) + 3:.1f}" class="small" text-anchor="end">{value:g}</text>'
            )
    below = TOP + HEIGHT + 16
    parts += [f'<text x="{x(index):.1f}" y="{below}" text-anchor="middle">{index:g}</text>' for index in indices]
    parts.append(f'<text x="{left}" y="{TOP + HEIGHT + 34}" class="small">flat</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 34}" class="small" text-anchor="end">steep</text>')
    for number, line in enumerate(lines.values()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, value in line.items())
        parts.append(f'<polyline points="{points}" stroke="{color}"/>')
        parts += [f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="3" fill="{color}"/>' for i, v in line.items()]
    return parts
