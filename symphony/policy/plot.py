"""Picture of a comparison: for each policy, three bars with the mean and p99 latency of turns, and the throughput."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_BAR, _GAP, _GROUP, _HEIGHT, _LEFT, _TOP = 34, 4, 112, 170, 16, 70
_COLORS = ("#2563eb", "#d97706", "#0f9f8f")
_STYLE = (
    "text{font:12px sans-serif;fill:#1f2937}.small{font-size:10px}line{stroke:#9ca3af}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e7eb}}"
)
_SERIES = (
    ("latency_mean_s", "mean latency, s"),
    ("latency_p99_s", "p99 latency, s"),
    ("turns_per_s", "turns a second"),
)


def bars(policies: Mapping[str, Mapping[str, Any]], heading: str, about: str) -> str:
    """Return the picture as SVG.
    `policies`: numbers by policy. Each of the three series has its own scale, from zero.
    """
    width, height = max(_LEFT * 2 + len(policies) * (_GROUP + 12), 560), _TOP + _HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<text x="10" y="18">{escape(heading)}</text>',
        f'<text x="10" y="34" class="small">{escape(about)}</text>',
    ]
    for index, (_, word) in enumerate(_SERIES):
        x = 10 + index * 150
        parts.append(f'<rect x="{x}" y="42" width="10" height="10" fill="{_COLORS[index]}"/>')
        parts.append(f'<text x="{x + 14}" y="51" class="small">{word}</text>')
    floor = _TOP + _HEIGHT
    most = {key: max(each[key] for each in policies.values()) or 1 for key, _ in _SERIES}
    for number, (name, each) in enumerate(policies.items()):
        left = _LEFT + number * (_GROUP + 12)
        for index, (key, _) in enumerate(_SERIES):
            x, size = left + index * (_BAR + _GAP), (_HEIGHT - 16) * each[key] / most[key]
            parts.append(
                f'<rect x="{x}" y="{floor - size:.1f}" width="{_BAR}" height="{size:.1f}" fill="{_COLORS[index]}"/>'
                f'<text x="{x + _BAR / 2}" y="{floor - size - 4:.1f}" class="small" text-anchor="middle">'
                f"{each[key]:.3g}</text>"
            )
        word = escape(name.rpartition("/")[2])
        parts.append(f'<text x="{left + _GROUP / 2}" y="{floor + 18}" text-anchor="middle">{word}</text>')
    parts.append(f'<line x1="10" x2="{width - 10}" y1="{floor}" y2="{floor}"/></svg>')
    return "\n".join(parts) + "\n"
