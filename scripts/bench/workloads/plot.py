"""A picture of rates: one group of bars for each workload, one bar a side, from zero, with the spread as a line."""

from __future__ import annotations

import statistics
from html import escape

BAR, GAP, GROUP_GAP, HEIGHT, LEFT, TOP = 26, 4, 34, 220, 60, 64
COLORS = ("#2563eb", "#0f9f8f", "#d97706", "#9333ea", "#dc2626", "#64748b", "#65a30d", "#db2777", "#0891b2")
STYLE = (
    "text{font:12px sans-serif;fill:#1f2937}.small{font-size:10px}line{stroke:#9ca3af}.spread{stroke:#111827}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e7eb}.spread{stroke:#f9fafb}}"
)


def bars(rates: dict[str, dict[str, list[float]]], heading: str) -> str:
    """`rates`: tokens a second by workload and side. Each workload has a scale of its own: they are not compared."""
    sides = list(next(iter(rates.values())))
    group = len(sides) * (BAR + GAP) + GROUP_GAP
    width, height = max(LEFT + len(rates) * group + 20, 760), TOP + HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        '<text x="10" y="18">Tokens a second, medians; lines from the least to the most</text>',
        f'<text x="10" y="34" class="small">{escape(heading)}</text>',
    ]
    for index, side in enumerate(sides):
        x = 10 + index * 130
        parts.append(f'<rect x="{x}" y="42" width="10" height="10" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="51" class="small">{escape(side)}</text>')
    floor = TOP + HEIGHT
    for number, (name, by_side) in enumerate(rates.items()):
        top = max(max(runs) for runs in by_side.values())
        x = LEFT + number * group
        for index, runs in enumerate(by_side.values()):
            middle = statistics.median(runs)
            y, low, high = (floor - (HEIGHT - 14) * rate / top for rate in (middle, min(runs), max(runs)))
            left = x + index * (BAR + GAP)
            color = COLORS[index % len(COLORS)]
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{BAR}" height="{floor - y:.1f}" fill="{color}"/>')
            at = left + BAR / 2
            parts.append(f'<line class="spread" x1="{at}" x2="{at}" y1="{low:.1f}" y2="{high:.1f}"/>')
            parts.append(f'<text x="{at}" y="{high - 4:.1f}" class="small" text-anchor="middle">{middle:.0f}</text>')
        center = x + (group - GROUP_GAP) / 2
        parts.append(f'<text x="{center}" y="{floor + 18}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<line x1="{LEFT - 10}" x2="{width - 10}" y1="{floor}" y2="{floor}"/></svg>')
    return "\n".join(parts) + "\n"
