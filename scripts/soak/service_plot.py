"""Plot of a soak: the figures of each reading over time, with the restarts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pictures"))

from svg import THEMES, Drawing

WIDTH, PANEL, GAP = 860, 120, 44
LEFT, RIGHT = 20, 840
COLOURS = ("#0550ae", "#953800", "#116329")
"""Colours of the curves. Each has enough contrast on the page."""
PANELS = (
    ("resident memory, MB", {"daemon_mb": "daemon", "launcher_mb": "launcher"}),
    ("descriptors", {"daemon_fds": "daemon", "launcher_fds": "launcher"}),
    ("threads", {"daemon_threads": "daemon", "launcher_threads": "launcher"}),
    ("free pages", {"free_pages": "at rest"}),
    ("pred() beside the load, ms", {"p50_ms": "p50", "p99_ms": "p99"}),
)


def draw(title: str, looks: Sequence[Mapping[str, float]], ends: Sequence[tuple[float, str]]) -> str:
    """Draw the plot. `looks` are readings, with `s` seconds since the start. `ends` has time and cause of each end."""
    theme = THEMES[0]
    height = 70 + len(PANELS) * (PANEL + GAP)
    drawing = Drawing(theme, WIDTH, height, title)
    drawing.box(0, 0, WIDTH, height, fill=theme.page, radius=0)
    drawing.words(LEFT, 26, title, room=WIDTH - 2 * LEFT, on=theme.page, size=15, bold=True)
    key = "one point: the end of a round; a bar: the daemon was ended, by SIGTERM (short) or kill -9 (long)"
    drawing.words(LEFT, 46, key, room=WIDTH - 2 * LEFT, on=theme.page, colour=theme.quiet)
    last_s = max([each["s"] for each in looks] + [s for s, _ in ends])
    for number, (name, curves) in enumerate(PANELS):
        _panel(drawing, 84 + number * (PANEL + GAP), name, curves, looks, ends, last_s)
    return str(drawing)


def _panel(
    drawing: Drawing,
    top: float,
    name: str,
    curves: Mapping[str, str],
    looks: Sequence[Mapping[str, float]],
    ends: Sequence[tuple[float, str]],
    last_s: float,
) -> None:
    theme, bottom = drawing.theme, top + PANEL
    most = max(max(each[key] for each in looks) for key in curves) or 1.0
    drawing.box(LEFT, top, RIGHT - LEFT, PANEL, fill=theme.room, radius=0)

    def x(s: float) -> float:
        return LEFT + (RIGHT - LEFT) * s / last_s

    for s, how in ends:
        drawing.path(f"M{x(s):.1f} {bottom}V{top if how == 'SIGKILL' else bottom - 12:.1f}")
    for (key, label), colour, place in zip(curves.items(), COLOURS, (0, 1, 2), strict=False):
        before, steps = -1, ""
        for each in looks:  # one line for each life
            life = sum(s < each["s"] for s, _ in ends)
            place_y = bottom - (PANEL - 6) * each[key] / most
            steps += f"{'L' if life == before else 'M'}{x(each['s']):.1f} {place_y:.1f}"
            before = life
        drawing.path(steps, colour=colour)
        drawing.words(
            560 + 140 * place, top - 6, f"— {label}", room=130, on=theme.page, colour=colour, bold=True, size=12
        )
    drawing.words(LEFT, top - 6, f"{name}: 0 to {most:,.4g}", room=400, on=theme.page, size=12)
    if bottom > 84 + (len(PANELS) - 1) * (PANEL + GAP):
        drawing.words(LEFT, bottom + 18, "0", room=20, on=theme.page, colour=theme.quiet, size=12)
        drawing.words(RIGHT - 70, bottom + 18, f"{last_s / 60:.1f} min", room=70, on=theme.page, size=12)
